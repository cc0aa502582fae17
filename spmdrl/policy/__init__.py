"""Models that train. A new backend is a folder beside `fsdp/` that implements the contract; nothing above changes.

contract.py     the Policy contract
backends.py     the backends by name
models.py       the models that an algorithm needs, and their ranks
learner.py      updates of a model, the same for every backend
grad_guard.py   skips optimizer steps that are not finite, notices gradients that spike
loss_scale.py   the scale of a loss whose backward runs in float16
optimizer.py    AdamW, its schedule, the global gradient norm
heads.py        logp and entropy, or a value, for every token of a pack
self_check.py   the form in which a model is right: packed, or one sequence a forward
probe.py        how far a form is from plain transformers
likelihood.py   the loss of supervised fine-tuning
pairs.py        the loss of pairs of responses
distillation.py what a teacher leaves in a batch, the divergence that a student learns by
aligned.py      the distance from a teacher that reads other tokens
labels.py       labels of a reward model that a file describes
remote.py       a frozen model on ranks of its own
model_files.py  files beside the weights in a checkpoint: configuration, tokenizer
safe_pickle.py  checks an optimizer's pickles before anything loads them
attention/      attention over packed sequences
mixers/         recurrent layers and short convolutions over packed sequences
fsdp/           any HF transformer under FSDP2
megatron/       the model families of docs/megatron.md on Megatron-core
"""
