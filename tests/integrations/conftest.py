# Test helpers that import optional frameworks; pytest collects doctests from every other module.
collect_ignore = [
    "flower_processes.py",
    "flower_training.py",
    "hostile_clients.py",
    "jax_training.py",
    "lora_training.py",
    "opacus_ranks.py",
    "opacus_training.py",
    "reduce_ranks.py",
    "torch_ranks.py",
    "secagg_app.py",
]
