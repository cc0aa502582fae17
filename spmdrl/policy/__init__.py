"""Trainable and frozen models. To add a backend, implement the contract in a folder next to `fsdp/` and add it to
`models.backend`.

contract.py     the Policy contract
models.py       selects the backend by name; builds the models that an algorithm needs
learner.py      the training step shared by all backends
grad_guard.py   skips non-finite optimizer steps, detects gradient-norm spikes, scales the loss in float16
optimizer.py    AdamW and its learning rate schedule
forward_plan.py plans a forward pass in host memory: shared prompts, positions, the tokens that the head needs
apart.py        runs the sequences of a packed batch one by one
heads.py        computes logp and entropy, or a value, for every token in the loss mask
vision.py       images in the forward pass of a packed batch
self_check.py   finds the fastest correct way to run a model: shared prompts, packed, one sequence at a time
probe.py        measures how far each way to run a model deviates from plain transformers
probe_images.py runs test sequences with images for the probe
liger.py        records what Liger's kernels replace in a model, so that the self-check can undo it
labels.py       the labels of a reward model that is configured by a file
remote.py       a frozen model on separate ranks
model_files.py  non-weight files of a checkpoint: configuration, tokenizer
safe_pickle.py  checks pickles in optimizer state before they are loaded
objectives/     losses: policy updates, likelihood, preference pairs, scores, distillation
attention/      attention over packed sequences
mixers/         recurrent layers and short convolutions over packed sequences
fsdp/           any HF transformer on FSDP2
megatron/       the model families of docs/megatron.md on Megatron-core
"""
