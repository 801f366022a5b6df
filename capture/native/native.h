/* What the straight way through a call is made of, in C: the same steps as in Python, without its frames.

   No header of torch or CUDA is needed: torch is asked through the Python functions that it is given, the driver
   through its library. Without this module every step runs in Python. */
#ifndef CAPTURE_NATIVE_H
#define CAPTURE_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>

#define NATIVE_VERSION 19 /* as in ``_fast.py``: another one with each change of what Python and C ask of each other */
#define MOST_VALUES 512 /* of one call; longer ones go the long way */

/* 1, 0, or -1 with an exception set. */
int modes_hold(PyObject *modes);
int is_modes(PyObject *one);

/* Ways of one mode share the object. */
PyObject *modes_of(PyObject *way);

/* The result of a call whose modes hold; the way's ``MISS`` for one that it is not made for. */
PyObject *way_take(PyObject *way, PyObject *const *args, Py_ssize_t given);
int is_way(PyObject *one);

/* Attributes that are read where their class keeps them: each such class says so (``_fast.seen``). Lists, dicts and what
   an object is made with are never other ones. */
#define TREE(X) \
    X(path) X(warm) X(buried) X(lingering) X(kept) X(times) X(current) X(root) X(mark) X(pool_is_at) X(pool)
#define NODE(X) X(followers) X(view) X(verified) X(check) X(checker) X(unchecked) X(registered) X(recording)
#define ENTRY(X) X(phase)
#define COUNTERS(X) X(replays)
#define MARKS(X) X(begun)
#define IN_USE(X) X(trees)
#define CHECKER(X) X(facts)
#define SOURCE(X) X(held) X(first) X(address)
#define OUTPUT_PLAN(X) X(policy)
#define POOL(X) X(ran_on) X(beside)
#define PLACE(X) X(kind) X(holder) X(name) X(path) X(parent)
#define CLASSES(X) \
    X(Tree, TREE) X(Node, NODE) X(Entry, ENTRY) X(Counters, COUNTERS) X(Marks, MARKS) X(InUse, IN_USE) \
    X(Checker, CHECKER) X(Source, SOURCE) X(OutputPlan, OUTPUT_PLAN) \
    X(CudaPool, POOL) X(Place, PLACE)
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
/* NULL with an exception set. */
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
int add_slots(PyObject *module);
int add_places(PyObject *module);
int add_node_count(PyObject *module);
int add_follow(PyObject *module);

/* What stays as it is once a recording is in its tree. */
typedef struct {
    PyObject_HEAD
    PyObject *outputs; /* OutputPlan */
    PyObject *source;  /* of its one fresh tensor, or None where there is more to do */
    PyObject *several; /* ``OutputPlan.several``, or None */
    PyObject *live;    /* a list: what watches each group handed out last */
    PyObject *pattern; /* a tuple: addresses of arguments that are outputs on the path, or None */
    PyObject *before;  /* a tuple: lists such as ``live`` and the place in them of what is dead before it may run */
    PyObject *tensors; /* a list: the tensors handed out last, a list each */
    int preserving;    /* tensors are handed out as they are, and need not be known */
} NodeView;

extern PyTypeObject NodeViewType;
int add_views(PyObject *module);

/* What a member of ``live`` watches is used: 1, 0, or -1 with an exception set. */
int is_used(PyObject *watch);
/* ``OutputPlan.build_single`` where the source has what it needs, else NULL without an exception. */
PyObject *single_output(NodeView *view);
/* ``OutputPlan.build`` where there are fresh tensors, constants and repeats alone. */
PyObject *several_outputs(NodeView *view, PyObject *pool);
/* Copies are handed out: 1, 0, -1. */
int copies_outputs(NodeView *view);
int add_held(PyObject *module);
int add_gradients(PyObject *module);

/* The way's steps from the tree on, once the arguments fit. */
typedef struct {
    PyObject *miss, *ok, *function, *limit, *number, *entry, *counters, *marks, *replay, *ready;
    PyObject *registrations; /* a function: how often modules registered something */
    PyObject *attach;        /* a function: the result as part of the caller's graph; or None */
    int verifies;
    long sampled; /* calls from one full comparison to the next; 0: each is one */
    Py_ssize_t count, tensors;
} Steps;
PyObject *steps_take(
    const Steps *steps, PyObject *tree, PyObject *const *values, PyObject *const *tensors, const uint64_t *addresses);
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
} Driver;
extern Driver driver;
int add_driver(PyObject *module);

/* Copies: 0, or an error of the driver, with which nothing may be launched. */
int copies_point(PyObject *copies, const uint64_t *addresses);
/* Addresses of the leaves that are copied: 0, or -1 with an exception set. */
int copies_read(PyObject *copies, PyObject *const *leaves, Py_ssize_t count, uint64_t *addresses);
int is_copies(PyObject *one);
int add_copies(PyObject *module);

PyObject *list_of(PyObject *const *items, Py_ssize_t count);

/* Facts about Python state, and the tensors among it: 1 if they hold, else 0. ``addresses``: of the call's tensors. */
int facts_hold(PyObject *facts, const uint64_t *addresses, Py_ssize_t count);
int is_facts(PyObject *one);
/* The same object, or a number, text, bytes, size or device of the same type and value, bit for bit: 1, 0, -1. */
int same_value(PyObject *one, PyObject *other);
int add_facts(PyObject *module);

/* Where torch keeps what it knows of a tensor: offsets that ``_torch_private_layout`` found. */
#define MOST_ZEROS 4
typedef struct {
    Py_ssize_t impl_in_object;   /* pointers: object -> TensorImpl */
    Py_ssize_t storage_in_impl;  /* -> StorageImpl */
    Py_ssize_t data_in_storage;  /* -> the memory */
    Py_ssize_t meta_in_impl;     /* -> AutogradMeta, or NULL */
    Py_ssize_t requires_in_meta; /* a byte: whether it is a leaf that requires a gradient */
    Py_ssize_t zeros[MOST_ZEROS]; /* words that are 0 unless an operator made the tensor */
    Py_ssize_t zero_count;
    Py_ssize_t begin, end;       /* metadata in the TensorImpl */
    Py_ssize_t sizes;            /* where it begins to say the same of tensors that are alike */
} Layout;
int layout_from(PyObject *given, Layout *layout);
/* The tensor's own gradient mode: 0 or 1; 2 for one that an operator made. */
unsigned char requires_gradient(const Layout *layout, const char *impl);
/* Where the memory of its storage begins; NULL where there is none. */
const char *data_of(const Layout *layout, const char *impl);
static inline const char *pointer_at(const char *from, Py_ssize_t offset)
{
    return *(const char *const *)(from + offset);
}

/* A tensor as it is at a moment, with torch's and Python's counts of who has it. The bytes of its metadata go beside. */
typedef struct {
    const PyObject *object;
    const PyTypeObject *type;
    const char *impl, *storage, *data;
    uint64_t holders, users; /* torch's counts of the TensorImpl and of its storage */
    Py_ssize_t references;
    unsigned char requires;
} Seen;
/* Torch's count of the holders of a TensorImpl or a StorageImpl; those that hold it weakly are in the upper half. */
uint64_t count_at(const char *from);
/* 0 for what is no tensor with memory. */
int see(const Layout *layout, PyObject *tensor, Seen *seen);
/* The same tensor as it was, and nobody came or went. ``bytes``: its metadata then. */
int is_as_seen(const Layout *layout, PyObject *tensor, const Seen *was, const char *bytes);
static inline Py_ssize_t width_of(const Layout *layout)
{
    return layout->end - layout->begin;
}

/* Other tensors have the same metadata: 1, and their addresses; 0 where torch has to be asked. */
int alike_hold(PyObject *alike, PyObject *const *tensors, Py_ssize_t count, uint64_t *addresses);
int is_alike(PyObject *one);
int add_alike(PyObject *module);

int tensors_hold(PyObject *tensors);
int is_tensors(PyObject *one);
int add_tensors(PyObject *module);

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

/* Truth of a result, which is given up: 1, 0, or -1 if it is NULL. */
int truth_of(PyObject *result);

/* Whether ``one`` is a Launch, whose steps the caller may run without an argument tuple. */
int is_launch(PyObject *one);

/* Copy in, launch: 0, or -1 with an exception set. ``addresses``: of the leaves, in their order. */
int launch_run(PyObject *launch, PyObject *const *leaves, const uint64_t *addresses, Py_ssize_t count);

/* The address of a tensor: 0 and ``*address``, or -1 with an exception set. */
int address_of(PyObject *tensor, uint64_t *address);

int add_modes(PyObject *module);
int add_launch(PyObject *module);
int add_way(PyObject *module);
int add_ways(PyObject *module);

#endif
