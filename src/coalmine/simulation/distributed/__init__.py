"""Training in several processes, called ranks, which share the clients of every round.

Rank 0 has the model, the canaries, the noise and the audit. The other ranks wait for a round, train their share of its
clients and contribute their sum.
"""
