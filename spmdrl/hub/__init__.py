"""Hugging Face models: folders on disk, building a model, adapters and routers in it.

resolve.py    the folder that --model.path names
shipped.py    configurations of published models beside the package, for plans
folder.py     checks a folder; explains errors of libraries in plain words
gguf.py       converts a GGUF file into a folder, once
grown.py      a folder with tokens added, once
ends.py       the end tokens that a folder names
tokenizer.py  the tokenizer of a folder
build.py      the model of a folder, with its weights or without values
quantized.py  the quantised folders that are read: fp8 by blocks
lora.py       low-rank adapters in a model
rotary.py     the lengths at which the frequencies of rotary embeddings change
routing.py    records and replays the choices of routers in a mixture of experts
"""
