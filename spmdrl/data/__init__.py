"""The data of a run: prompts, episodes, packed batches, micro-batches.

sources.py     rows from files, HF datasets, reasoning-gym and built-in tasks
builtin.py     the built-in tasks
chat.py        a prompt or chat messages as tokens
prompts.py     the prompts of a run
order.py       which prompts are drawn, by seed and count
episode.py     one sample of a prompt: observed and sampled tokens, and its reward
batch.py       many episodes packed end to end, and dealt out to ranks
packing.py     micro-batches up to a token budget
tree.py        shares a prompt's tokens among its samples
treefile.py    plain values and tensors as one safetensors file
"""
