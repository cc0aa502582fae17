"""Models that train. A new backend is a folder beside `fsdp/` that keeps the contract; nothing above it changes.

contract.py     the Policy contract
backends.py     the backends by name
models.py       which models an algorithm needs, and on which ranks they are
learner.py      updates of a model, the same for every backend
grad_guard.py   steps that are not finite are skipped; gradients that spike are noticed
optimizer.py    AdamW, its schedule, the global gradient norm
heads.py        logp and entropy, or a value, for every token of a pack
remote.py       a frozen model on ranks of its own
model_files.py  files beside the weights in a checkpoint: configuration, tokenizer
safe_pickle.py  looks at an optimizer's pickles before anything reads them
attention/      attention over packed sequences
fsdp/           any HF transformer under FSDP2
megatron/       the families of docs/megatron.md on Megatron-core
"""
