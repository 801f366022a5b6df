"""A call becomes a key: what must be equal for a plan and its recordings to apply.

In: a function and the arguments of one call. Out: values for all parameters (``signature``), their leaves and
containers (``pytree``), the key: metadata of tensors (``tensor_meta``), plain values by type and bits, the modes that
change what operators compute (``modes``), and the plain values that the function's own code names (``code_names``).

Invariant: two calls with one key may take one recording, as far as these can tell. What the key leaves out is guarded
(``guards``), or watched (``observe``). It prevents the replay of a recording for a call with another shape, another
flag or another mode, which would give wrong numbers without an error.
"""
