/* FastPath: the steps through a call like an earlier one, in the order of their cost.

   A difference from the call that the path was made for gives ``MISS`` before anything has happened: the caller takes the
   general way. So no step may change anything before the last one that can give ``MISS``. */
#include <time.h>
#include "torch_abi.h"

#include <structmember.h>

#define TIMED_EVERY 64 /* two looks at a clock take 40 ns */
#define TIMES_KEPT 16
#define ANYWHERE 64 /* the alignment of a tensor that may have any */

/* How a tensor lies. Where some share memory they are a group, and the one where it begins is its leader. */
typedef struct {
    uint64_t span;     /* bytes from its first to its last, of a leader to the group's last */
    uint64_t shift;    /* bytes from where the group begins */
    uint16_t leader;   /* the tensor where its group begins, or itself */
    uint16_t object;   /* the first that is the same object */
    uint16_t order;    /* of the first ones: leaders that are not empty, as they lay when the path was made */
    uint8_t alignment; /* its address modulo 64, or ANYWHERE */
    uint8_t leading;   /* how many first dimensions, of size 1, may have other strides */
} Placed;

typedef struct {
    PyObject_HEAD
    PyObject *modes;       /* Modes */
    PyObject *defaults_of; /* a Python function, or None */
    PyObject *defaults;    /* its default values then */
    PyObject *in_capture;  /* a function, or None where nothing is ever captured by others */
    Comparison all;        /* compares metadata of all tensors, and with it the dispatch keys of this thread */
    Trusted trusted;       /* those that need not be compared again */
    PyObject *receiver;    /* a weak reference, or None */
    PyObject *kind;        /* its type */
    PyObject *guards;      /* Guards: other parts of the key are as they were; or None */
    PyObject *in_use;      /* InUse: the trees of this thread */
    PyObject *trees;       /* those then, by their keys */
    PyObject *tree_key;    /* such a key */
    PyObject *constants;   /* tuple: a value, or MISS in the place of a tensor; of opened values where there are nodes */
    PyObject *nodes;       /* how containers among the values are opened, see ``opened.c``; or None */
    PyObject *names;       /* tuple: for each tensor a frozenset of the names of its attributes, or None for one that has
                              none; or None where no tensor has some */
    Steps steps;           /* holds references, too */
    Py_ssize_t least, most; /* values that a call may give: the others are defaults */
    Placed *placed;        /* one for each tensor */
    Py_ssize_t apart;      /* how many have an ``order`` */
    int shares;            /* some share memory */
    vectorcallfunc vectorcall;
    uint32_t taken;       /* calls, those that missed too */
    Py_ssize_t left;      /* replays until the body runs instead, all of which are timed; or -1 */
    uint32_t timed;
    struct { uint64_t begin, nanoseconds, own; } times[TIMES_KEPT]; /* of the calls that were timed last; ``own``: of
                                                                       the thread, where the path is on trial */
} FastPath;

static PyTypeObject FastPathType;
static PyObject *s_ready;

/* No two leaders share memory. Most lie in the order they had. */
static int are_apart(FastPath *self, const uint64_t *addresses)
{
    Py_ssize_t i = 1;
    for (; i < self->apart; i++) {
        uint16_t before = self->placed[i - 1].order;
        if (addresses[self->placed[i].order] < addresses[before] + self->placed[before].span)
            break;
    }
    if (i >= self->apart)
        return 1;
    for (i = 1; i < self->apart; i++)
        for (Py_ssize_t j = 0; j < i; j++) {
            uint16_t one = self->placed[i].order, other = self->placed[j].order;
            uint64_t a = addresses[one], b = addresses[other];
            if (a < b ? b - a < self->placed[one].span : a - b < self->placed[other].span)
                return 0;
        }
    return 1;
}

/* Those that shared memory share it in the same way, and are the same objects or not as they were. */
static int share_alike(FastPath *self, PyObject *const *tensors, const uint64_t *addresses)
{
    for (Py_ssize_t i = 0; i < self->steps.tensors; i++) {
        if (addresses[i] - addresses[self->placed[i].leader] != self->placed[i].shift || tensors[i] != tensors[self->placed[i].object])
            return 0;
        for (Py_ssize_t j = 0; j < i && self->placed[i].object == i; j++)
            if (self->placed[j].leader == self->placed[i].leader && tensors[j] == tensors[i])
                return 0;
    }
    return 1;
}

/* Strides of first dimensions that nobody compared are in order, and beyond all else: 1, 0, -1. */
static int leads(PyObject *tensor, Py_ssize_t count)
{
    TensorMeta meta;
    if (!is_plain_tensor(tensor) || !read_meta(tensor, &meta) || meta.dim < count)
        return 0;
    int64_t least = 1;
    for (Py_ssize_t i = count; i < meta.dim; i++)
        least *= meta.sizes[i];
    for (Py_ssize_t i = count - 1; i >= 0; least = meta.strides[i], i--)
        if (meta.strides[i] < least)
            return 0;
    return 1;
}

/* Torch's own comparison: 1, 0, -1. */
static int has_metadata(Comparison *self, PyObject *const *tensors, Py_ssize_t count)
{
    int flags = PyCFunction_CheckExact(self->check) ? PyCFunction_GET_FLAGS(self->check) : 0;
    if (count == 0 || !(flags & METH_VARARGS))
        return truth_of(PyObject_Vectorcall(self->check, tensors, count, NULL));
    PyObject *arguments = self->arguments;
    self->arguments = NULL; /* a call in this one takes another */
    if (arguments == NULL) {
        if ((arguments = PyTuple_New(count)) == NULL)
            return -1;
        PyObject_GC_UnTrack(arguments);
    }
    for (Py_ssize_t i = 0; i < count; i++)
        PyTuple_SET_ITEM(arguments, i, Py_NewRef(tensors[i]));
    PyCFunction compare = PyCFunction_GET_FUNCTION(self->check);
    PyObject *on = PyCFunction_GET_SELF(self->check);
    int same = truth_of(
        flags & METH_KEYWORDS ? ((PyCFunctionWithKeywords)(void (*)(void))compare)(on, arguments, NULL) : compare(on, arguments));
    if (Py_REFCNT(arguments) != 1 || self->arguments != NULL) {
        Py_DECREF(arguments);
        return same;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_DECREF(tensors[i]); /* the call has them, too */
        PyTuple_SET_ITEM(arguments, i, NULL);
    }
    self->arguments = arguments;
    return same;
}

/* The tensors have the metadata of those of the call that the path was made for: 1 with their addresses, 0, -1.
   ``trusted``: only those are looked at that are not. */
static int are_alike(FastPath *self, PyObject *const *tensors, uint64_t *addresses, int trusted)
{
    PyObject *looked_at[MOST_VALUES];
    Py_ssize_t count = 0;
#define IS_LOOKED_AT(i) (!trusted || self->trusted.known[i].kind == UNTRUSTED)
    for (Py_ssize_t i = 0; i < self->steps.tensors; i++)
        if (self->placed[i].object != i) { /* torch's comparison takes no tensor twice */
            if (tensors[i] != tensors[self->placed[i].object])
                return 0;
        } else if (IS_LOOKED_AT(i)) {
            int nested = is_nested(tensors[i]);
            if (nested)
                return nested < 0 ? -1 : 0;
            looked_at[count++] = tensors[i];
        }
    int same = has_metadata(trusted ? &self->trusted.others : &self->all, looked_at, count);
    for (Py_ssize_t i = 0; same > 0 && i < self->steps.tensors; i++)
        if (IS_LOOKED_AT(i)) {
            int read = is_plain_tensor(tensors[i]) && read_address(tensors[i], &addresses[i]);
            if (!read && address_of(tensors[i], &addresses[i]) < 0)
                return -1;
            same = self->placed[i].alignment == ANYWHERE || (addresses[i] & 63) == self->placed[i].alignment;
            if (same && self->placed[i].leading)
                same = leads(tensors[i], self->placed[i].leading);
        }
    return same;
}

/* Stands for an object that is told by identity: weak references to it and to its class. No value is such a tuple. */
static int is_by_id(PyObject *constant)
{
    return PyTuple_Check(constant) && PyTuple_GET_SIZE(constant) == 2 &&
           PyWeakref_Check(PyTuple_GET_ITEM(constant, 0)) && PyWeakref_Check(PyTuple_GET_ITEM(constant, 1));
}

static int is_told(PyObject *constant, PyObject *value)
{
    return value == referent_of(PyTuple_GET_ITEM(constant, 0)) &&
           (PyObject *)Py_TYPE(value) == referent_of(PyTuple_GET_ITEM(constant, 1));
}

/* Whether the value of an argument, or in one, is the constant: 1, 0, -1. */
static int is_constant(PyObject *constant, PyObject *value)
{
    if (constant == (PyObject *)&PyLong_Type) /* a number that is an input of its own, and is compared as that */
        return PyLong_CheckExact(value) || PyFloat_CheckExact(value);
    return is_by_id(constant) ? is_told(constant, value) : same_value(constant, value);
}

/* Arguments of the same kinds: 1 with the tensors and their addresses, 0, -1. */
static int fits(FastPath *self, PyObject *const *values, PyObject **tensors, uint64_t *addresses)
{
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->constants); i++) {
        PyObject *constant = PyTuple_GET_ITEM(self->constants, i);
        if (constant == self->steps.miss) {
            tensors[count++] = values[i];
        } else {
            int equal = is_constant(constant, values[i]);
            if (equal <= 0)
                return equal;
        }
    }
    int trusted = trusted_hold(&self->trusted, tensors, addresses);
    int same = trusted < 0 ? -1 : are_alike(self, tensors, addresses, trusted);
    for (Py_ssize_t i = 0; same > 0 && i < count; i++)
        same = self->names == Py_None || PyTuple_GET_ITEM(self->names, i) == Py_None
                   ? is_bare(tensors[i])
                   : has_attributes(tensors[i], PyTuple_GET_ITEM(self->names, i));
    if (same > 0 && self->shares)
        same = share_alike(self, tensors, addresses);
    if (same > 0)
        same = are_apart(self, addresses);
    if (same > 0 && !trusted) {
        if (self->trusted.takes == 0 && self->taken % TIMED_EVERY == 0) /* what was of no use may be of use later */
            self->trusted.takes = 1;
        if (take_trusted(&self->trusted, tensors, addresses) < 0)
            return -1;
    }
    return same;
}

/* The world around the call is as it was: 1, 0, -1. Modes and the function are looked at before. */
static int is_at_hand(FastPath *self, Where *where)
{
    where->is_known = 0;
    PyObject *phase = SLOT(self->steps.entry, Entry, phase), *trees = SLOT(self->in_use, InUse, trees);
    if (phase == NULL || trees == NULL)
        return -1;
    int ready = phase == s_ready ? 1 : PyObject_RichCompareBool(phase, s_ready, Py_EQ);
    if (ready <= 0)
        return ready;
    if (trees != self->trees) /* those of a thread that waits for autograd, which runs backward passes for several */
        return 0;
    if (self->receiver != Py_None && (PyObject *)Py_TYPE(referent_of(self->receiver)) != self->kind)
        return 0;
    if (self->in_capture != Py_None) {
        int captured = is_captured(self->in_capture, where);
        if (captured)
            return captured < 0 ? -1 : 0;
    }
    return 1;
}

/* The key's guards hold: 1, 0, -1. */
static int key_holds(FastPath *self)
{
    int verdict = guards_verdict(self->guards, NULL, 0);
    return verdict < 0 ? -1 : verdict == HOLDS;
}

static PyObject *missed(FastPath *self, int verdict)
{
    return verdict < 0 ? left_to_python(self->steps.miss) : Py_NewRef(self->steps.miss);
}

/* ``opened``: the values, or what is in containers among them. */
static PyObject *run_opened(FastPath *self, PyObject *const *values, PyObject *const *opened, const Where *where)
{
    PyObject *tensors[MOST_VALUES];
    uint64_t addresses[MOST_VALUES];
    tensors[0] = NULL;
    int same = fits(self, opened, tensors, addresses);
    if (same > 0 && self->guards != Py_None)
        same = key_holds(self);
    if (same <= 0)
        return missed(self, same);
    PyObject *tree = Py_XNewRef(PyDict_GetItemWithError(self->trees, self->tree_key));
    if (tree == NULL)
        return missed(self, PyErr_Occurred() ? -1 : 0);
    PyObject *result = self->left == 0 ? steps_ready(&self->steps, values, tensors)
                                       : steps_take(&self->steps, tree, values, tensors, addresses, where);
    Py_DECREF(tree);
    return result;
}

static PyObject *path_run(FastPath *self, PyObject *const *values)
{
    Where where;
    int same = is_at_hand(self, &where);
    if (same <= 0)
        return missed(self, same);
    if (self->nodes == Py_None)
        return run_opened(self, values, values, &where);
    Flat flat;
    same = open_values(self->nodes, values, &flat);
    if (same > 0)
        same = flat.count == PyTuple_GET_SIZE(self->constants);
    PyObject *result = same > 0 ? run_opened(self, values, flat.values, &where) : missed(self, same);
    close_values(&flat);
    return result;
}

/* Of the clock of ``time.perf_counter_ns``. */
static uint64_t nanoseconds_of(const struct timespec *time)
{
    return (uint64_t)time->tv_sec * 1000000000u + (uint64_t)time->tv_nsec;
}

/* Runs the path; one call of many is timed, for reports, and all of a path on trial. */
static PyObject *path_sampled(FastPath *self, PyObject *const *values)
{
    if (self->left == 0) { /* the body is to be measured: it runs with as little before it as in a loop of its own */
        Py_INCREF(self);
        PyObject *measured = path_run(self, values);
        Py_DECREF(self);
        return measured;
    }
    if (++self->taken % TIMED_EVERY != 8 && self->left < 0)
        return path_run(self, values);
    struct timespec begin, end, own_begin = {0, 0}, own_end = {0, 0};
    int on_trial = self->left > 0; /* another program that has the processor meanwhile must not decide then */
    Py_INCREF(self);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    if (on_trial)
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &own_begin);
    PyObject *result = path_run(self, values);
    if (on_trial)
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &own_end);
    clock_gettime(CLOCK_MONOTONIC, &end);
    if (result != NULL && result != self->steps.miss)
    {
        uint64_t from = nanoseconds_of(&begin), to = nanoseconds_of(&end);
        Py_ssize_t at = self->timed++ % TIMES_KEPT;
        self->times[at].begin = from;
        self->times[at].nanoseconds = to - from;
        self->times[at].own = nanoseconds_of(&own_end) - nanoseconds_of(&own_begin);
        self->left -= self->left > 0;
    }
    Py_DECREF(self);
    return result;
}

PyObject *path_take(PyObject *object, PyObject *const *args, Py_ssize_t given, int bound)
{
    FastPath *self = (FastPath *)object;
    if (self->steps.miss == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the function is being collected");
        return NULL;
    }
    if (bound ? given != self->steps.count : given < self->least || given > self->most)
        return missed(self, 0);
    if (!bound && self->defaults_of != Py_None &&
        PyFunction_GetDefaults(self->defaults_of) != (self->defaults == Py_None ? NULL : self->defaults))
        return missed(self, 0);
    if (given == self->steps.count)
        return path_sampled(self, args);
    if (self->nodes != Py_None) /* constants are not those of parameters then */
        return missed(self, 0);
    PyObject *values[MOST_VALUES];
    for (Py_ssize_t i = 0; i < self->steps.count; i++)
        values[i] = i < given ? args[i] : PyTuple_GET_ITEM(self->constants, i);
    return path_sampled(self, values);
}

int is_path(PyObject *one)
{
    return Py_TYPE(one) == &FastPathType;
}

PyObject *modes_of(PyObject *path)
{
    return ((FastPath *)path)->modes;
}

static PyObject *path_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names)
{
    FastPath *self = (FastPath *)object;
    int same = names != NULL || self->modes == NULL ? 0 : modes_hold(self->modes);
    if (self->steps.miss == NULL)
        return path_take(object, args, 0, 0);
    return same <= 0 ? missed(self, same) : path_take(object, args, PyVectorcall_NARGS(nargsf), 0);
}

static PyObject *path_bound(PyObject *object, PyObject *values)
{
    FastPath *self = (FastPath *)object;
    if (!PyTuple_Check(values)) {
        PyErr_SetString(PyExc_TypeError, "bound values are a tuple");
        return NULL;
    }
    int same = self->modes == NULL ? 0 : modes_hold(self->modes);
    if (same <= 0 && self->steps.miss != NULL)
        return missed(self, same);
    return path_take(object, &PyTuple_GET_ITEM(values, 0), PyTuple_GET_SIZE(values), 1);
}

static PyObject *path_times(PyObject *object, PyObject *Py_UNUSED(nothing))
{
    FastPath *self = (FastPath *)object;
    uint32_t count = self->timed < TIMES_KEPT ? self->timed : TIMES_KEPT;
    PyObject *times = PyList_New(count);
    for (uint32_t i = 0; times != NULL && i < count; i++) {
        PyObject *one = Py_BuildValue(
            "KK", (unsigned long long)self->times[i].begin, (unsigned long long)self->times[i].nanoseconds);
        if (one == NULL)
            Py_CLEAR(times);
        else
            PyList_SET_ITEM(times, i, one);
    }
    return times;
}

static PyObject *path_own_times(PyObject *object, PyObject *Py_UNUSED(nothing))
{
    FastPath *self = (FastPath *)object;
    uint32_t count = self->timed < TIMES_KEPT ? self->timed : TIMES_KEPT;
    PyObject *times = PyList_New(0);
    for (uint32_t i = 0; times != NULL && i < count; i++) {
        PyObject *one = self->times[i].own == 0 ? NULL : PyLong_FromUnsignedLongLong(self->times[i].own);
        if (self->times[i].own != 0 && (one == NULL || PyList_Append(times, one) < 0))
            Py_CLEAR(times);
        Py_XDECREF(one);
    }
    return times;
}

static PyMethodDef methods[] = {
    {"own_times", path_own_times, METH_NOARGS,
     "Nanoseconds of this thread's own time that replays took which were timed on trial, of those timed last."},
    {"times", path_times, METH_NOARGS, "Begin and length, in nanoseconds, of the replays that were timed last."},
    {"bound", path_bound, METH_O, "The result of a call with these values of all parameters, or MISS."},
    {NULL, NULL, 0, NULL},
};

#define OBJECTS(X) \
    X(modes) X(defaults_of) X(defaults) X(in_capture) X(all.check) X(guards) X(receiver) X(kind) \
    X(in_use) X(trees) X(tree_key) \
    X(constants) X(nodes) X(names) X(steps.miss) X(steps.ok) X(steps.function) X(steps.limit) X(steps.number) X(steps.entry) \
    X(steps.counters) X(steps.marks) X(steps.replay) X(steps.ready) X(steps.attach) X(steps.tell) X(steps.raised)

static int path_traverse(PyObject *object, visitproc visit, void *arg)
{
    FastPath *self = (FastPath *)object;
#define VISIT(name) Py_VISIT(self->name);
    OBJECTS(VISIT)
    Py_VISIT(self->trusted.make);
    Py_VISIT(self->trusted.others.check);
    return 0;
}

static int path_clear(PyObject *object)
{
    FastPath *self = (FastPath *)object;
#define CLEAR(name) Py_CLEAR(self->name);
    OBJECTS(CLEAR)
    end_trusted(&self->trusted);
    return 0;
}

static void path_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    path_clear(self);
    Py_XDECREF(((FastPath *)self)->all.arguments);
    PyMem_Free(((FastPath *)self)->placed);
    Py_TYPE(self)->tp_free(self);
}

/* ``order``: the leaders. ``shared``: a leader, a shift and an object for each tensor, or empty. */
static int set_tensors(
    FastPath *self, PyObject *alignments, PyObject *leading, PyObject *spans, PyObject *order, PyObject *shared)
{
    Py_ssize_t count = self->steps.tensors, leaders = PyTuple_GET_SIZE(order);
    self->shares = PyTuple_GET_SIZE(shared) > 0;
    if (leaders > count || (self->shares && PyTuple_GET_SIZE(shared) != 3 * count)) {
        PyErr_SetString(PyExc_ValueError, "another number of tensors");
        return -1;
    }
    if ((self->placed = PyMem_Calloc((size_t)count + 1, sizeof(Placed))) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        long long found[5] = {0, 0, i, 0, i}, ones = PyLong_AsLongLong(PyTuple_GET_ITEM(leading, i));
        found[0] = PyLong_AsLongLong(PyTuple_GET_ITEM(alignments, i));
        found[1] = PyLong_AsLongLong(PyTuple_GET_ITEM(spans, i));
        for (int part = 0; self->shares && part < 3; part++)
            found[2 + part] = PyLong_AsLongLong(PyTuple_GET_ITEM(shared, 3 * i + part));
        if (!PyErr_Occurred() && (found[2] < 0 || found[2] >= count || found[4] < 0 || found[4] >= count))
            PyErr_SetString(PyExc_ValueError, "no such tensor");
        if (PyErr_Occurred())
            return -1;
        self->placed[i].alignment = (uint8_t)found[0];
        self->placed[i].leading = (uint8_t)(ones < 255 ? ones : 255); /* torch has no more than 64 dimensions */
        self->placed[i].span = (uint64_t)found[1];
        self->placed[i].leader = (uint16_t)found[2];
        self->placed[i].shift = (uint64_t)found[3];
        self->placed[i].object = (uint16_t)found[4];
    }
    for (Py_ssize_t i = 0; i < leaders; i++) {
        long long leader = PyLong_AsLongLong(PyTuple_GET_ITEM(order, i));
        if (leader < 0 || leader >= count) {
            PyErr_SetString(PyExc_ValueError, "no such tensor");
            return -1;
        }
        self->placed[self->apart++].order = (uint16_t)leader;
    }
    return 0;
}

/* A frozenset, or None, for each of so many tensors; or None for all: 1, 0. */
static int are_names(PyObject *names, Py_ssize_t count)
{
    if (names == Py_None)
        return 1;
    int are = PyTuple_Check(names) && PyTuple_GET_SIZE(names) == count;
    for (Py_ssize_t i = 0; are && i < count; i++)
        are = PyTuple_GET_ITEM(names, i) == Py_None || PyFrozenSet_CheckExact(PyTuple_GET_ITEM(names, i));
    return are;
}

static PyObject *path_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {
        "modes", "miss", "ok", "function", "defaults_of", "defaults", "entry", "number", "limit", "in_capture", "check",
        "guards", "receiver", "kind", "in_use", "trees", "tree", "counters", "marks",
        "replay", "ready", "constants", "nodes", "names", "alignments", "leading", "spans", "order", "shared", "least", "most", "verifies", "attach",
        "tell", "raised", "others", "static", NULL};
    FastPath given = {0};
    Steps *steps = &given.steps;
    PyObject *alignments, *leading, *spans, *order, *shared, *others, *is_static;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "$OOOOOOOOOOOOOOOO!OOOOOO!OOO!O!O!O!O!nnpOOOOO!", names, &given.modes, &steps->miss, &steps->ok,
            &steps->function, &given.defaults_of, &given.defaults, &steps->entry, &steps->number, &steps->limit,
            &given.in_capture, &given.all.check, &given.guards, &given.receiver,
            &given.kind, &given.in_use, &PyDict_Type, &given.trees, &given.tree_key, &steps->counters,
            &steps->marks, &steps->replay, &steps->ready, &PyTuple_Type, &given.constants, &given.nodes,
            &given.names,
            &PyTuple_Type, &alignments,
            &PyTuple_Type, &leading, &PyTuple_Type, &spans, &PyTuple_Type, &order, &PyTuple_Type, &shared, &given.least, &given.most,
            &steps->verifies, &steps->attach, &steps->tell, &steps->raised, &others, &PyTuple_Type, &is_static))
        return NULL;
    Py_ssize_t opened = PyTuple_GET_SIZE(given.constants);
    if (given.nodes != Py_None && !are_nodes(given.nodes)) {
        PyErr_SetString(PyExc_ValueError, "no nodes");
        return NULL;
    }
    given.steps.count = given.nodes == Py_None ? opened : PyTuple_GET_SIZE(given.nodes);
    given.steps.tensors = PyTuple_GET_SIZE(alignments);
    if (opened > MOST_VALUES || given.steps.count > MOST_VALUES || given.steps.tensors > opened ||
        given.most > given.steps.count || PyTuple_GET_SIZE(spans) != given.steps.tensors ||
        PyTuple_GET_SIZE(leading) != given.steps.tensors || PyTuple_GET_SIZE(is_static) != given.steps.tensors ||
        !is_modes(given.modes) || !are_names(given.names, given.steps.tensors) ||
        (given.guards != Py_None && !is_guards(given.guards)) ||
        (given.receiver != Py_None && !PyWeakref_Check(given.receiver)) ||
        (given.defaults_of != Py_None && !PyFunction_Check(given.defaults_of))) {
        PyErr_SetString(PyExc_ValueError, "too many values, or no function");
        return NULL;
    }
    if (!is_of(given.in_use, slots.InUse.type) || !are_seen(&given.steps))
        return NULL;
    FastPath *self = (FastPath *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->steps = given.steps;
#define TAKE(name) self->name = Py_NewRef(given.name);
    OBJECTS(TAKE)
    self->vectorcall = path_call;
    self->left = -1;
    self->least = given.least;
    self->most = given.most;
    if (set_tensors(self, alignments, leading, spans, order, shared) < 0 ||
        begin_trusted(&self->trusted, others, is_static, shared) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMemberDef members[] = {
    {"left", T_PYSSIZET, offsetof(FastPath, left), 0, "Replays until the body runs instead, all of which are timed; or -1."},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject FastPathType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.FastPath",
    .tp_doc = "The result of a call like the one it was made for; its MISS for any other.",
    .tp_basicsize = sizeof(FastPath),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(FastPath, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_methods = methods,
    .tp_members = members,
    .tp_new = path_new,
    .tp_dealloc = path_dealloc,
    .tp_traverse = path_traverse,
    .tp_clear = path_clear,
};

int add_fast_path(PyObject *module)
{
    s_ready = PyUnicode_InternFromString("ready");
    if (s_ready == NULL || PyType_Ready(&FastPathType) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "FastPath", (PyObject *)&FastPathType);
}
