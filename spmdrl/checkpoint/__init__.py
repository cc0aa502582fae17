"""Checkpoints: written under a temporary name, verified against a manifest, and published by an atomic rename.

checkpoints/step_<N>/model/         weights as HF safetensors in `--model.dtype`, config, tokenizer; transformers and
                                    vLLM load it
checkpoints/step_<N>/state/         run.json, config.yaml, ranks/, optimizer (torch.distributed.checkpoint: moments
                                    and, if `--model.dtype` has 16 bits and no adapters train, float32 weights)
checkpoints/step_<N>/adapter/       the LoRA adapter, if one trains
checkpoints/step_<N>/<name>/        model/ and state/ of a critic or another trained model
checkpoints/step_<N>/MANIFEST.json  size and hash of every file, step, ranks, layout, versions; every checkpoint has one
checkpoints/latest                  link to the newest checkpoint
checkpoints/measured.json           metrics per checkpoint, measured after it was saved (--checkpoint.best)

files.py          file names, hashes, flushing and free disk space; does not import torch, nor do the next two
manifest.py       writes and reads manifests, and verifies files against them
published.py      lists, publishes and removes a run's checkpoints, and finds the best one by a metric
store.py          writes and reads a checkpoint, collectively on all ranks
treefile.py       writes and reads plain values and tensors as one safetensors file
background.py     writes checkpoints synchronously, or in a background thread while training continues
folder.py         locks and checks the run folder when a run starts
lock.py           locks a run folder for one job at a time
compare.py        lists the differences between two checkpoints
__main__.py       python -m spmdrl.checkpoint list, verify, diff
"""
