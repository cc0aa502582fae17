"""Work that every rank would do again: the server that forks ranks imports this file and does it once.

transformers compiles some 600 patterns for the names of weights with the first model, and torch fills tables with the
first call of many functions: a quarter of a second for each process. No group, no thread and no gradient is made here,
and what is random is undone.
"""

import threading

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from spmdrl.hub.folder import TINY
from spmdrl.weights.experts import Layout


def warm_up() -> None:
    """Runs the shipped model and its tokenizer once."""
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY))
    Layout(model)
    tokens = AutoTokenizer.from_pretrained(TINY)("abc=", return_tensors="pt").input_ids
    with torch.no_grad():
        model(input_ids=tokens, position_ids=torch.arange(tokens.shape[1])[None])
    torch.set_rng_state(state)
    torch.set_num_threads(threads)
    assert threading.active_count() == 1, threading.enumerate()


warm_up()
