"""Hugging Face models: their folders on disk, building them, and adapters and routers in them.

resolve.py    finds or downloads the folder that --model.path names
shipped.py    configurations of published models in a clone of the repository, to plan jobs without weights
folder.py     checks a folder and its quantisation; turns errors of libraries into messages of one line
cache.py      the cache of model folders that spmdrl makes only once
gguf.py       converts a GGUF file into a folder
grown.py      makes a folder with tokens added to the tokenizer
ends.py       the end tokens that a folder names, and the generation config with all of them
tokenizer.py  loads and checks the tokenizer of a folder
build.py      builds the model of a folder, with its weights or empty
lora.py       low-rank adapters (LoRA) in a model
rotary.py     the sequence lengths beyond which the frequencies of rotary embeddings change
routing.py    records and replays the choices of routers in a mixture of experts
"""
