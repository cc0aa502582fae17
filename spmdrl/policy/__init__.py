"""Models that train. A new backend is a folder beside `fsdp/` that implements the contract; nothing above changes.

contract.py     the Policy contract
models.py       the backends by name; builds the models that an algorithm needs, each on its ranks
learner.py      updates a model, the same way for every backend
grad_guard.py   skips optimizer steps that are not finite, notices gradients that spike, scales the loss in float16
optimizer.py    AdamW, its schedule, the global gradient norm
heads.py        logp and entropy, or a value, for every token of a pack
self_check.py   finds the fastest form in which a model computes correctly: packed, or one sequence per forward
probe.py        measures how far a form is from plain transformers
labels.py       labels of a reward model that a file describes
remote.py       a frozen model on ranks of its own
model_files.py  files beside the weights in a checkpoint: configuration, tokenizer
safe_pickle.py  checks an optimizer's pickles before anything loads them
objectives/     what models learn: policy updates, likelihood, pairs, scores, teachers
attention/      attention over packed sequences
mixers/         recurrent layers and short convolutions over packed sequences
fsdp/           any HF transformer under FSDP2
megatron/       the model families of docs/megatron.md on Megatron-core
"""
