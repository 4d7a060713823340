"""One training over several processes: ranks that divide the clients of every round.

Rank 0 has the model, the canaries, the noise and the audit. The others wait for a round, train their share of its clients
and add their sum to the common one.
"""
