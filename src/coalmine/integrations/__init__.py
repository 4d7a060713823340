"""Audits inside training frameworks: one module per framework, one verb.

    thing = audited(thing, model, claim=3.0, canaries=1_000, seed=..., delta=1e-5, directory="runs/mine")
    ...  # train as usual
    print(thing.audit.finish())

| module | `audited` takes | and returns | canaries are |
|---|---|---|---|
| `flower` | a strategy | a strategy around it | clients, replaced replies or extra replies |
| `opacus` | the optimizer of `make_private` | the same optimizer | extra examples |
| `jax_privacy` | a privatizer or a plan | a privatizer around it, or a plan with it | extra examples |
| `pfl` | a privacy mechanism | a postprocessor in its place | users named canary-0, canary-1, … |
| `nvflare` | a recipe | the same recipe | sites |

The keywords are the same everywhere: `canaries`, `unobserved`, `seed` or `seed_file`, `delta` and `directory` make the
audit. Or pass your own as `audit`. `scale` is the length of a canary in clip norms before the clip: 10 if canaries go
through a clip, otherwise 1. `clip_norm` and `noise_multiplier` are read from the framework if it has them.
`claim` is the epsilon that the framework's accountant quotes for one unit over the whole run; without it nothing can pass.
`thing.audit.finish(task=…)` returns the `AuditResult`, and writes result.json if there is a directory.

Two differences follow from the frameworks. In NVFlare `canaries` lists the names of sites, and the server makes and finishes
the audit: it needs a directory, and there is no `audit` keyword. In `jax_privacy` canaries that go through the clip always
have scale 10, and `finish` takes the state of the noise.

`transformers` audits a Hugging Face Trainer that uses Opacus: `audited(…)` returns a callback for it, with an `audit` and a
`finish`. `torch_distributed` is not a framework: its `reduce_over` sums an audit's numbers over the ranks of a training run,
for `opacus` under DDP and FSDP2 and for `Audit.for_model`.

`files` audits a pipeline that runs elsewhere, by the files that it reads and writes.

CONTRIBUTING.md says how to add a framework.
"""
