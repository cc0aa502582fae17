"""Hugging Face models: their folders on disk, building them, and adapters and routers in them.

resolve.py    the folder that --model.path names
shipped.py    configurations of published models beside the package, for plans
folder.py     checks a folder and its quantisation; turns errors of libraries into messages of one line
cache.py      the cache of model folders that are made only once
gguf.py       converts a GGUF file into a folder
grown.py      makes a folder with tokens added to the tokenizer
ends.py       the end tokens that a folder names, and the generation config with all of them
tokenizer.py  the tokenizer of a folder
build.py      the model of a folder, with its weights or without values
lora.py       low-rank adapters (LoRA) in a model
rotary.py     the lengths at which the frequencies of rotary embeddings change
routing.py    records and replays the choices of routers in a mixture of experts
"""
