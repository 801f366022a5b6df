"""The CUDA engine: a body becomes a CUDA graph in one private pool a thread and device.

``engine`` records: ``capture_graph`` begins and ends a capture and finds the way back from a failed one, ``recorder``
watches the body and refuses what a capture would not survive, ``host_tensors`` does so for CPU tensors,
``verifying_recorder`` for a run that is known already, ``segment_run`` where the host reads values: there a capture
ends, is launched, and another begins. ``replay`` runs a recording: ``copy_in`` copies inputs,
``bound_inputs`` points the graph at arguments. A graph holds addresses; ``calibrate`` captures a second time to learn
which parameters hold which (``address_inference``, ``kernel_params``), and ``address_table`` sets them anew. It holds
numbers, too: ``lifting`` captures with other ones to learn where (``number_inference``), and sets each call's own.
``memory_recorder`` notes what operators do with memory, ``scheduling`` makes an order of kernels of it, ``graph_edges``
gives it to the graph, and ``schedule_choice`` times it. ``pool`` and ``streams`` keep memory and order.

Invariant: nothing runs on the device while a body is captured; the first replay is the call. ``segments`` replays what
was captured in parts. A capture that fails
must leave torch, the driver and the caller's state as they were.
"""
