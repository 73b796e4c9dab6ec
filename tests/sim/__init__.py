"""Deterministic simulation: a whole cluster in one process and in virtual time.

One seed decides everything that happens. Gateways, controller, supervisors, nodes, engines,
channels and frames are the product's code. The machine below them is simulated:

- ``loop.py``, ``threads.py``, ``chance.py``: time, threads and randomness.
- ``net.py``: connections.
- ``fake_ray.py``, ``actors.py``: Ray.
- ``wire.py``: the backend of channels.
- ``lockstep.py``: the collectives of a gang.
- ``model.py``: the checkpoint.

``world.py`` puts these together. ``clients.py`` sends requests, ``faults.py`` injects faults and
``checks.py`` checks invariants. ``run.py`` runs one seed. docs/failures.md describes the whole.

    python -m tests.sim --seeds 1000 [--first 1]
    python -m tests.sim --once
    python -m tests.sim --seed 7 [--log] [--shrink] [--fault FAULT ..]
"""
