"""Models that train or score. To add a backend, add a folder next to `fsdp/` that implements the contract, and select
it in `models.backend`.

contract.py     the Policy contract
models.py       selects the backend by name; builds the models that an algorithm needs on their ranks
learner.py      updates a model, in the same way for every backend
grad_guard.py   skips non-finite optimizer steps, detects spikes of the gradient norm, scales the loss in float16
optimizer.py    AdamW and its learning rate schedule
forward_plan.py plans a forward in host memory: shared prompts, positions, the tokens that the head needs
heads.py        computes logp and entropy, or a value, for every token under the loss mask
self_check.py   finds the fastest correct way to run a model: sharing prompts, packed, one sequence per forward
probe.py        measures how much a way to run a model differs from plain transformers
liger.py        records what Liger's kernels replace in a model, so that the self-check can undo it
labels.py       describes the labels of a reward model that a file configures
remote.py       a frozen model on separate ranks
model_files.py  files next to the weights in a checkpoint: configuration, tokenizer
safe_pickle.py  checks an optimizer's pickles before they are loaded
objectives/     losses: policy updates, likelihood, preference pairs, scores, distillation
attention/      attention over packed sequences
mixers/         recurrent layers and short convolutions over packed sequences
fsdp/           any HF transformer under FSDP2
megatron/       the model families of docs/megatron.md on Megatron-core
"""
