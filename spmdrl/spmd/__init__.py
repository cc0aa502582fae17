"""Runs one program on many ranks: process groups, collectives, the prompt queue, seeds.

mesh.py        starts the job: process groups, mesh axes, and a `World` for the run, frozen models or a thread
world.py       groups, axes and roles of one rank
roles.py       the ranks that train, score and sample; sizes of axes
devices.py     the device of each rank
network.py     the network interface between nodes
peers.py       a group of ranks and the device of its collectives
exchange.py    exchanges ragged tensors by one all_to_all; small collectives
payload.py     processed images, held once per content, and their transfer between ranks
balance.py     gives every rank equal work (Karmarkar-Karp)
queue.py       hands out prompts to engines
seeds.py       random numbers keyed by data
generators.py  saves and restores random number generator states
lockstep.py    debug mode: reports the source lines where ranks run different collectives
agreement.py   checks once a step that all ranks ran the same number of collectives and hold equal values
gloo.py        all-gather and reduce-scatter on gloo by direct sends
checksum.py    checksums of tensors
copies.py      copies tensors to and from a device without stalling it
storage.py     moves tensors off their device and back
"""
