"""``io-daemon bench``: is this machine fast enough for my model, with which settings, and how long will the drive live?

One noun a file. ``settings`` what to measure, ``workload`` which block next (pure), ``pattern`` what the bytes are and
how they are checked (pure), ``target`` the file, ``engines/`` who performs the block I/Os, ``job`` one target under
load, ``run`` all jobs of a measurement, ``result`` what comes out. On these stand ``sweep``, ``compare`` and ``steps/``
(a training step replayed); ``report/`` says it to people and to CI.
"""
