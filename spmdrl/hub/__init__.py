"""Hugging Face models: their folders on disk, building them, and adapters and routers in them.

resolve.py    finds or downloads the folder given by --model.path
shipped.py    configs of published models in a clone of the repository, for planning jobs without weights
folder.py     checks a folder and its quantisation; turns library errors into one-line messages
cache.py      the cache of model folders created by spmdrl
gguf.py       converts a GGUF file into a folder
grown.py      creates a folder with tokens added to the tokenizer
ends.py       the end tokens listed in a folder, and a generation config with all end tokens
tokenizer.py  loads and checks the tokenizer of a folder
build.py      builds a folder's model, with its weights or uninitialised
scorers.py    classifiers of families that read images, for critics and reward models
lora.py       low-rank adapters (LoRA) in a model
rotary.py     the sequence lengths beyond which rotary frequencies change
routing.py    records and replays the expert choices of MoE routers
vision.py     facts of the families that read images: ids, forms of positions, names of the parts
images.py     turns images into tensors, once per image
expand.py     expands the placeholders of images, and computes position ids
encode.py     runs the vision tower once per image, and gives each placeholder its feature
"""
