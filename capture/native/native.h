/* What the fast path through a call is made of, and the guards that are checked before every replay.

   No header of torch or CUDA is needed: torch is asked through Python functions that this module is given, the driver
   through its library.

   Results of the functions here and in the files beside it: a comment such as "The arguments fit: 1, 0, -1." says what 1
   means; 0 is the contrary, and -1 comes with an exception set. "0, -1" is done, or failed with an exception set. A
   function that gives an object gives a new reference, or NULL with an exception set, unless its comment says
   otherwise. */
#ifndef CAPTURE_NATIVE_H
#define CAPTURE_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>

#define NATIVE_VERSION 54 /* as in ``__init__.py``: another one with each change of what Python and C ask of each other */
#define MOST_VALUES 512 /* of one call; longer ones go the general way */

/* The modes are as they were when this was made: 1, 0, or -1 with an exception set. */
int modes_hold(PyObject *modes);
int is_modes(PyObject *one);

/* The Modes that a path compares, borrowed. Paths under the same modes share one object. */
PyObject *modes_of(PyObject *path);

/* The result of a call whose modes hold; the path's ``MISS`` for one that it is not made for. ``bound``: the arguments
   are the values of all parameters, else what a caller gave by position. */
PyObject *path_take(PyObject *path, PyObject *const *args, Py_ssize_t given, int bound);
int is_path(PyObject *one);

/* Attributes that are read where their class keeps them: each such class says so (``capture.native.seen``). Lists, dicts and what
   an object is made with are never other ones. */
#define TREE(X) \
    X(path) X(warm) X(buried) X(lingering) X(times) X(pins) X(current) X(root) X(mark) X(pool_is_at) X(pool)
#define NODE(X) X(clear_of) X(latest_children) X(verified) X(parts) X(reads)
#define CAPTURED(X) X(is_backward) X(number)
#define ENTRY(X) X(phase) X(steadiness)
#define STEADINESS(X) X(replays)
#define COUNTERS(X) X(replays)
#define MARKS(X) X(begun)
#define IN_USE(X) X(trees)
#define GUARD(X) X(kind) X(source) X(expected) X(verdict)
#define SHARED_STORAGE(X) X(held) X(first) X(address)
#define POOL(X) X(ran_on) X(beside)
#define SOURCE(X) X(kind) X(holder) X(name) X(path) X(parent)
#define CLASSES(X) \
    X(Tree, TREE) X(Node, NODE) X(Entry, ENTRY) X(Counters, COUNTERS) X(Marks, MARKS) X(InUse, IN_USE) \
    X(Guard, GUARD) X(SharedStorage, SHARED_STORAGE) \
    X(CudaPool, POOL) X(Source, SOURCE) X(Captured, CAPTURED) X(Steadiness, STEADINESS)
#define AT(name) Py_ssize_t name;
#define OF_CLASS(class, names) \
    struct { \
        PyTypeObject *type; \
        names(AT) \
    } class;
extern struct Slots {
    CLASSES(OF_CLASS)
} slots;
/* An object of this very class: 1, or 0 with an exception set. */
int is_of(PyObject *object, const PyTypeObject *type);
/* Where objects of a class keep an attribute, or -1. */
Py_ssize_t slot_of(PyObject *type, PyObject *name);
/* Sets the error for a slot without a value. Always NULL. */
PyObject *unset(void);
/* A borrowed reference, or NULL with an exception set. */
static inline PyObject *slot_at(PyObject *object, Py_ssize_t at)
{
    PyObject *found = *(PyObject **)((char *)object + at);
    return found == NULL ? unset() : found;
}
#define SLOT(object, class, name) slot_at(object, slots.class.name)
void put(PyObject *object, Py_ssize_t at, PyObject *value);
#define PUT(object, class, name, value) put(object, slots.class.name, value)
/* ``dict_versions.c``: of a dict, to be given back; NULL where it has none, without an exception. */
#if PY_VERSION_HEX < 0x030C0000
typedef PyDictObject Version;
#define NUMBER_OF(version) ((version)->ma_version_tag)
#else
typedef struct Version {
    uint64_t number; /* 0: the dict is gone */
    PyObject *of;    /* a dict, or a tuple of several */
    Py_ssize_t users, num_groups;
    struct Version **groups; /* of several dicts, this one among them: their numbers change with it */
} Version;
#define NUMBER_OF(version) ((version)->number)
#endif
Version *version_of_dict(PyObject *dict);
/* One version for all dicts in a tuple, which has to outlive it; NULL, without an exception, where one has none. */
Version *version_of_dicts(PyObject *dicts);
void version_done(Version *version);
int add_dict_versions(PyObject *module);
int add_slots(PyObject *module);
int add_places(PyObject *module);
int add_node_count(PyObject *module);
int add_follow(PyObject *module);

/* What begins with a replay that cannot be undone, and has to come to its end: results, effects, where the tree stands.
   What comes in between, as a signal's exception, is put off until then. */
typedef struct Commit {
    struct Commit *around;
    PyObject *errors; /* a list, or NULL */
    int ran;          /* the replay itself, which no exception after it changes */
    int tries;
} Commit;
void commit_begin(Commit *commit);
void commit_end(Commit *commit);
/* ``ended``: the replay did so without an exception. Whether it ran: one that came after it is put off. */
int commit_ran(Commit *commit, int ended);
/* The exception that is set is put off: 1; 0: this is given up, and it stays. */
int commit_puts_off(Commit *commit);
/* The exception in flight, with its traceback: a new reference. */
PyObject *taken_error(void);
/* Puts it in flight again, with its traceback. */
void raise_again(PyObject *error);
/* An error of our own that is to stop no call is dropped: 0. -1 where it stays: it stops the program, or a signal handler
   raised it. Without an error 0. */
int drop_error(void);
/* As drop_error, where nothing can be raised: what is to come out does so at the next bytecode of the main thread, which
   alone runs signal handlers. What stops another thread is dropped: it is not to come out in the main one. */
void put_off_error(void);
/* ``tell`` is called with what was put off, or the first is raised: 0, or -1 with an exception set. */
int commit_told(const Commit *commit, PyObject *tell);
/* What was put off goes to the commit around, or the first is raised: 0, or -1 with an exception set. */
int commit_handed_up(const Commit *commit);

/* What stays as it is once a recording is in its tree. */
typedef struct {
    PyObject_HEAD
    PyObject *outputs; /* OutputPlan */
    PyObject *source;  /* of its one fresh tensor, or None where there is more to do: a SharedStorage, or a list and the
                          place in it where a replay leaves the tensor */
    PyObject *several; /* ``OutputPlan.several``, or None */
    PyObject *live;    /* a list: what watches each group handed out last */
    Py_ssize_t num_places;
    uint64_t *places;  /* addresses of arguments that are outputs on the path, 0 for others */
    PyObject *before;  /* a tuple: lists such as ``live`` and the place in them of what is dead before it may run */
    PyObject *tensors; /* a list: the tensors handed out last, a list each */
    PyObject *collect; /* makes the owned outputs after a replay, where that does not; or None */
    int preserving;    /* tensors are handed out as they are, and need not be known */
    long long used;    /* when it ran last, by a clock that counts what ran in this process */
    long long runs;    /* how often it ran, its recording run included */
} NodeView;

extern PyTypeObject NodeViewType;
/* See ``node_parts.c``: each may be NULL, which Python sees as None. */
typedef struct {
    PyObject_HEAD
    PyObject *view, *check, *recording, *function, *outputs, *guard, *statics, *program, *generators, *bound, *proofs,
        *listed_in;
    PyObject *ref; /* refers to them without keeping them; or NULL */
} NodeParts;
extern PyTypeObject NodePartsType;
/* Those of a node, borrowed; NULL with an exception set. */
NodeParts *parts_of(PyObject *node);
int add_node_parts(PyObject *module);
int add_views(PyObject *module);
int add_address_ranges(PyObject *module);
int add_output_filler(PyObject *module);
int is_address_ranges(PyObject *one);
int lies_in_ranges(PyObject *ranges, uint64_t address);

/* What a member of ``live`` watches is used: 1, 0, or -1 with an exception set. */
int is_used(PyObject *watch);
/* ``OutputPlan.build_single`` where the source has what it needs, else NULL without an exception. */
PyObject *single_output(NodeView *view);
/* ``OutputPlan.build`` where there are fresh tensors, aliases, constants and repeats alone. ``statics``: a dict. */
PyObject *several_outputs(
    NodeView *view, PyObject *pool, PyObject *statics, PyObject *const *tensors, Py_ssize_t num_tensors);
int add_held(PyObject *module);
int add_gradients(PyObject *module);

/* The values in the containers of a call, as ``opened.c`` tells. */
#define MOST_OBJECTS 64
typedef struct {
    Py_ssize_t count, num_objects;
    PyObject *values[MOST_VALUES];   /* references */
    PyObject *objects[MOST_OBJECTS]; /* borrowed: those that count once */
} Flat;
/* 1 with the values, 0 where the call looks otherwise, -1 with an exception set; ``close_values`` comes after any. */
int open_values(PyObject *nodes, PyObject *const *values, Flat *flat);
void close_values(Flat *flat);
int are_nodes(PyObject *nodes);

/* Where a call runs, as it was found at its begin. */
typedef struct {
    int is_known;
    long device;
    void *stream; /* the current one on it */
} Where;
/* The path's steps from the tree on, once the arguments fit. */
typedef struct {
    PyObject *miss, *ok, *function, *limit, *number, *entry, *counters, *marks, *replay, *ready;
    PyObject *attach;        /* a function: the result as part of the caller's graph; or None */
    PyObject *tell;          /* a function: takes what was put off */
    PyObject *raised;        /* a function: goes on where a replay in this process raised */
    int verifies;
    Py_ssize_t count, tensors;
} Steps;
PyObject *steps_take(
    const Steps *steps, PyObject *tree, PyObject *const *values, PyObject *const *tensors, const uint64_t *addresses,
    const Where *where);
/* The call goes on in Python, with nothing done. */
PyObject *steps_ready(const Steps *steps, PyObject *const *values, PyObject *const *tensors);
/* Its objects are of the classes that are read: 1, or 0 with an exception set. */
int are_seen(const Steps *steps);
int add_steps(PyObject *module);

/* The driver's functions, as in cuda.h: addresses are 64-bit integers, handles are pointers, 0 is success. */
#define DEVICE_MEMORY 2 /* CU_MEMORYTYPE_DEVICE */
typedef struct { /* CUDA_MEMCPY3D */
    size_t source_x, source_y, source_z, source_lod;
    int source_type;
    const void *source_host;
    uint64_t source;
    void *source_array, *reserved0;
    size_t source_pitch, source_height;
    size_t target_x, target_y, target_z, target_lod;
    int target_type;
    void *target_host;
    uint64_t target;
    void *target_array, *reserved1;
    size_t target_pitch, target_height;
    size_t width, height, depth;
} CopyParams;
typedef int (*GraphLaunch)(void *executable, void *stream);
typedef int (*ContextGet)(void **context);
typedef int (*GraphRoots)(void *graph, void **nodes, size_t *count);
typedef int (*GraphAddCopy)(
    void **node, void *graph, void *const *after, size_t count, const CopyParams *params, void *context);
typedef int (*ExecSetCopy)(void *executable, void *node, const CopyParams *params, void *context);
typedef int (*GraphDepend)(void *graph, void *const *from, void *const *to, size_t count);
typedef int (*CaptureInfo)(
    void *stream, int *status, uint64_t *identity, void **graph, void *const **after, size_t *count);
typedef int (*StreamCapturing)(void *stream, int *status);
typedef int (*GraphNodes)(void *graph, void **nodes, size_t *count);
typedef int (*GraphDependV2)(void *graph, void *const *from, void *const *to, const void *edges, size_t count);
typedef struct {
    GraphLaunch launch;
    ContextGet context;
    GraphRoots roots;
    GraphAddCopy add_copy;
    ExecSetCopy set_copy;
    GraphDepend depend;
    GraphDependV2 depend_v2;
    CaptureInfo capture_info;
    GraphNodes nodes;
    StreamCapturing is_capturing;
} Driver;
extern Driver driver;
int add_driver(PyObject *module);
int add_stack(PyObject *module);

/* Copies: 0, or an error of the driver, with which nothing may be launched. */
int copies_point(PyObject *copies, const uint64_t *addresses);
/* Addresses of the leaves that are copied: 0, or -1 with an exception set. */
int copies_read(PyObject *copies, PyObject *const *leaves, Py_ssize_t count, uint64_t *addresses);
int is_copies(PyObject *one);
int add_copies(PyObject *module);
int add_tape(PyObject *module);
/* Where the last replay of this tape parted, and nobody took over from there: what it wrote is put back. The exception
   that is set stays. Nothing for what is no tape. */
void tape_put_back(PyObject *object);
int add_mersenne(PyObject *module);
int add_guarded(PyObject *module);

PyObject *list_of(PyObject *const *items, Py_ssize_t count);

typedef PyObject *(*FastFunction)(PyObject *self, PyObject *const *arguments, Py_ssize_t count);

/* A function that is called again and again with the same arguments: a builtin's C function as the builtin would call
   it, without a frame, a look-up of how it takes them, or a new tuple. */
typedef struct {
    PyObject *function, *arguments; /* any object; a tuple */
    PyCFunction direct;             /* takes none, one, or the tuple; else NULL */
    PyObject *given;                /* what that gets; borrowed */
    PyCFunctionWithKeywords with_names; /* takes the tuple and a dict, as all of pybind11's do; else NULL */
    FastFunction fast;          /* takes an array; else NULL */
} Caller;
/* A caller with references of its own to the function and its arguments. */
Caller caller_of(PyObject *function, PyObject *arguments);
PyObject *call_again(const Caller *caller);
void forget_caller(Caller *caller);

/* What guards on Python state and its tensors say of a replay, as in ``guards/guard.py``. */
enum { HOLDS, MOVED, CHANGED, OVERLAPS };
/* A verdict, or -1 with an exception set. ``addresses``: of the call's tensors. */
int guards_verdict(PyObject *guards, const uint64_t *addresses, Py_ssize_t count);
int is_guards(PyObject *one);
/* The same object, or a number, text, bytes, size or device of the same type and value, bit for bit: 1, 0, -1. */
int same_value(PyObject *one, PyObject *other);
int add_guards(PyObject *module);
int add_code_watch(PyObject *module);
int add_operator_hook(PyObject *module);

/* Tensors that a recording reads where they are have the metadata and the address that they had: 1, 0, or -1 with an
   exception set. */
int static_tensors_hold(PyObject *tensors);
int is_static_tensors(PyObject *one);

/* While a profiler runs, a range in its trace for a replay of this function, else NULL: 0, or -1 with an interrupt set. */
int range_begin(PyObject *function, PyObject **range);
/* Gives the range up. Clears ``*result`` where an interrupt came meanwhile, which is set then. */
void range_end(PyObject *range, PyObject **result);
int add_profiler(PyObject *module);

/* Torch's count of who holds a watched storage; -1 with an exception set. */
long long storage_holders(PyObject *watch);
/* Python references to the object of a watched storage. */
Py_ssize_t storage_references(PyObject *watch);
long long most_holders(PyObject *watch, Py_ssize_t *references); /* while only one that was handed out uses it */
int is_storage_watch(PyObject *one);
/* Replays alone get this tensor, and none of them said that it went on to others: 1, 0, -1. */
int is_kept_apart(PyObject *tensor);
/* Another number once this is true of others than before. */
uint64_t apart_number(void);
/* Where tensors on a watched storage are handed out; 0: none was. */
uint64_t place_handed_out(PyObject *watch);

/* Names of attributes and methods, as objects: declared in a file, and made in the function that adds its part. */
#define DECLARE(name) static PyObject *s_##name;
#define INTERN(name) \
    if ((s_##name = PyUnicode_InternFromString(#name)) == NULL) \
        return -1;

/* A count that a call gave, which is given up; -1 with an exception set. */
long long number_of(PyObject *found);

/* What a weak reference refers to, borrowed: nothing that is alive takes it away meanwhile. */
static inline const PyObject *referent_of(PyObject *reference)
{
#if PY_VERSION_HEX < 0x030D0000
    return PyWeakref_GET_OBJECT(reference);
#else
    PyObject *found = NULL;
    if (PyWeakref_GetRef(reference, &found) < 0)
        PyErr_Clear();
    Py_XDECREF(found);
    return found == NULL ? Py_None : found;
#endif
}

/* The general way takes the call where an error came up before anything has happened: ``miss``, new; NULL for what stops a
   program, such as an interrupt. */
PyObject *left_to_python(PyObject *miss);

/* Truth of a result, which is given up: 1, 0, or -1 if it is NULL. */
int truth_of(PyObject *result);

/* Whether ``one`` is a Launch, whose steps the caller may run without an argument tuple. */
int is_launch(PyObject *one);

/* Somebody captures the current stream: 1, 0, -1. ``look``: any function that tells, a CaptureLook fills ``*where``. */
int is_captured(PyObject *look, Where *where);

/* Copy in, launch: 0, or -1 with an exception set. ``addresses``: of the leaves, in their order. */
int launch_run(
    PyObject *launch, PyObject *const *leaves, const uint64_t *addresses, Py_ssize_t count, const Where *where);

/* The address of a tensor: 0 and ``*address``, or -1 with an exception set. */
int address_of(PyObject *tensor, uint64_t *address);

int add_util(PyObject *module);
int add_binder(PyObject *module);
int add_modes(PyObject *module);
int add_launch(PyObject *module);
int add_fast_path(PyObject *module);
int add_fast_paths(PyObject *module);

#endif
