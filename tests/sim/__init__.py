"""Deterministic simulation: a whole cluster in one process and in virtual time.

Gateways, controller, supervisors, nodes, engines, channels and frames are those of the product, as
they are. Below them, in place of the machine: time, chance and threads of the standard library
(``loop.py``, ``threads.py``, ``chance.py``), connections (``net.py``), Ray (``fake_ray.py``,
``actors.py``), the backend of channels (``wire.py``), a gang's collectives (``lockstep.py``) and
the checkpoint (``model.py``). ``world.py`` puts them together, ``clients.py`` asks, ``faults.py``
is what goes wrong, ``checks.py`` what may not; ``run.py`` is one seed. README.md in this folder
has the details.

    python -m tests.sim --seeds 1000 [--first 1]
    python -m tests.sim --once
    python -m tests.sim --seed 7 [--log] [--shrink] [--fault FAULT ..]
"""
