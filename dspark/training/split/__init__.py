"""`train.features: split`: the target in processes of its own, on devices of their own.

`pool` is the trainer's side, `worker` the other, `buffer` the memory that both see, `devices` who
gets which. A pass goes to a worker when one of its slots is free, and comes back in that slot: so
a worker is never further ahead than its slots, and passes arrive in the order of the windows.
"""
