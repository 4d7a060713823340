"""The levels of all tests that can refute a true claim: the probabilities that they do so in a run.

All of them together refute a true claim in at most `TOTAL` of runs, whatever rungs and gauges a run has; the alarm during
training has its own `ALARM_TOTAL`. `coalmine.verdict.level_ledger` lists them. A new test takes its level from what is
left: none is added on top.
"""

TOTAL = 0.01  # of the verdict
TEST_LEVEL = 0.002  # of the mean score, on each of two rungs
BOUND_LEVEL = 0.001  # of the lower bounds of all rungs together
RECORDS_LEVEL = 0.0005  # of the outputs of the model, all rungs of data canaries together
SCAN_LEVEL = 0.001  # of single rounds, all together
GAUGE_LEVEL = 1e-4  # of each gauge

ALARM_TOTAL = 0.0025
EVIDENCE_LEVEL = 0.002  # of the scores, at any time
ALARM_GAUGE_LEVEL = 3.5e-5  # of each gauge that can prove a violation, and of single rounds, over all looks
ALARM_SAMPLER_LEVEL = 4e-5 / 16  # of each test of the sampler, over all looks
SAMPLER_TESTS = 10  # most tests of one scheme that an honest sampler can fail
