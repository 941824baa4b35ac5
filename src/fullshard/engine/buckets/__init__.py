"""Buckets: storage and communication of the parameters of a unit that share a mesh, a device and a dtype.

- ``base.py``           the base class: unshard, reshard, reduce; and what buckets with flat buffers share
- ``per_parameter.py``  parameters that are cut one by one, as DTensors are
- ``slices.py``         parameters that are cut into equal slices together: flattened ones, or those of an added layout
- ``extension.py``      tensor subclasses that say themselves what is all-gathered
- ``all_gather.py``     filling an unsharded buffer from the shards
- ``message.py``        where small parameters, or their gradients, lie in the packed message
- ``formats.py``        which bucket, parameter class and registration a front end uses
- ``storage.py``        dtypes and devices of what a bucket holds
"""
