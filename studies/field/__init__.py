"""Public implementations of differential privacy from PyPI, each checked against its own claim.

    python -m studies.field [NAME…] [--write-docs]

One file for each project says where its noise is added, what it claims, and what we expect and why. Each project's packages
are installed once, without their requirements, into a folder of their own under studies/out/field, and its checks run in a
process of their own; finished projects are not run again. Each check is repeated with half the noise, which must not pass.
"""

NOT_AUDITABLE = {  # no function that clips, sums and adds Gaussian noise to updates
    "autodp 0.2.3.1": "an accountant: it computes ε of mechanisms, and adds no noise to updates",
    "diffprivlib 0.6.6": "queries and models with noise of other laws on bounded data, each with a sensitivity of its own",
    "dp-accounting 0.6": "an accountant; this project uses it as one of its oracles",
    "dpmm 0.1.9": "noise on counts of tables, whose sensitivity is that of a histogram",
    "easyfl 0.1.2": "no mechanism in the package",
    "fate-client 2.2": "its noise is in a server that is not on PyPI",
    "fedlab 1.3": "no mechanism in the package",
    "fedscale 1.0": "its option adds noise in a loop that needs its own cluster",
    "pydp 0.1.16": "Laplace noise on bounded sums of numbers",
    "smartnoise-synth 1.0.8": "its networks call an interface of Opacus that was removed in Opacus 1.0",
    "substrafl 1.0": "no mechanism in the package: its example is Opacus",
    "synthcity 0.2.12": "its private networks train by Opacus; importing them needs a pinned stack of forty packages",
}
