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

To add a framework, write a module with a function `audited`:

1. Import the framework in a `try`, and name the extra to install in the ImportError. Add that extra to pyproject.toml.
2. Check the thing's type and the settings before anything is written. `setup.set_up_audit` then makes the audit, or takes
   the user's own. Pass it the name and size of each tensor, so that each gets a noise gauge.
3. In each round, put canaries where clients' updates enter. If you can, send each through the clip: `Audit.update(i,
   clip_norm, scale=10)`. Otherwise add their sum after the clip: `Audit.updates`.
4. After the noise, call `Audit.observe_round` with the release, the present canaries, the clipped sum of the others, the
   noise's std, the clip norm and the scale. All lengths are in the units of the release. Omit what you do not know.
5. Derive the class of `thing.audit` from `framework_audit.FrameworkAudit`. It holds the audit, writes config, metrics and
   result, and forwards what a user needs. Its `finish` has typed keywords, and ends with `conclude(claim, FinishedRun(…))`.
   A `FinishedRun` says how the framework's accountant counts the run (`accounted`), so that a claimed number is read as
   that accountant's. It has an `AuditedItem` for each part of the pipeline that only the framework knows about: clipping,
   weights, tensors, sampler, others.
6. Add an example, a page that shows its diff, and tests that compare it with the mechanism's epsilon.
"""
