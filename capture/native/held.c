/* Held: whether the memory of an output is in use; and outputs that are further aliases of a tensor made once. */
#include "torch_abi.h"

#define NAMES(X) X(data) X(build) X(build_left)
NAMES(DECLARE)

typedef struct {
    PyObject_HEAD
    Caller count;      /* a function: strong holders of the storage at an address */
    PyObject *storage; /* the storage's object */
    int unused;        /* nobody used it, and nothing was handed out since: so nobody does. Only known of what C hands
                          out; not where others may have it weakly */
    uint64_t place;     /* where its tensors are handed out; 0: none was */
    long long alone;    /* holders while nobody uses it */
    Py_ssize_t objects; /* references to the object then */
    PyObject *first;    /* a tensor, where its alias may be handed out again and again; or NULL */
    PyObject *again;    /* that alias */
    PyObject *uses;     /* a function: strong holders of a tensor */
    int shown;          /* users get it, and may hang something on it */
    int apart;          /* who gets the alias keeps it to itself, or tells that it went on (``tell_use``) */
    int went_on;        /* it did since the counts were looked at: what C++ may have of it is not known */
    KnownTensor known;  /* the alias while nobody uses it, and torch's and Python's counts of who has it */
    long long holders;
    Py_ssize_t references;
    vectorcallfunc vectorcall;
} StorageWatch;

static PyTypeObject StorageWatchType;

int is_storage_watch(PyObject *object)
{
    return Py_TYPE(object) == &StorageWatchType;
}

uint64_t place_handed_out(PyObject *watch)
{
    return is_storage_watch(watch) ? ((StorageWatch *)watch)->place : 0;
}

long long storage_holders(PyObject *watch)
{
    StorageWatch *self = (StorageWatch *)watch;
    return number_of(call_again(&self->count));
}

Py_ssize_t storage_references(PyObject *watch)
{
    return Py_REFCNT(((StorageWatch *)watch)->storage);
}

long long most_holders(PyObject *watch, Py_ssize_t *references)
{
    const StorageWatch *self = (StorageWatch *)watch;
    *references = self->objects;
    return self->alone + (self->again == NULL);
}

/* The watches whose alias is kept apart: address of the alias -> address of the watch. They leave it when they end. */
static PyObject *kept_apart;
static uint64_t times_changed; /* that one of them left it, went on to others, or is known again not to be with others */

uint64_t apart_number(void)
{
    return times_changed;
}

static void leave_apart(StorageWatch *self)
{
    if (!self->apart)
        return;
    times_changed++;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback); /* a watch may end while an exception is on its way */
    PyObject *key = PyLong_FromVoidPtr(self->again);
    if (key != NULL && PyDict_GetItemWithError(kept_apart, key) != NULL)
        PyDict_DelItem(kept_apart, key);
    Py_XDECREF(key);
    self->apart = 0;
    PyErr_Restore(type, error, traceback);
}

/* The watch whose alias, kept apart, this is; NULL, with an exception or without one. */
static StorageWatch *watch_of_alias(PyObject *tensor)
{
    PyObject *key = PyLong_FromVoidPtr(tensor), *found = key == NULL ? NULL : PyDict_GetItemWithError(kept_apart, key);
    Py_XDECREF(key);
    return found == NULL ? NULL : (StorageWatch *)PyLong_AsVoidPtr(found);
}

/* Somebody but a replay gets this tensor, and may leave it to autograd or make views of it. What nobody keeps apart is
   counted anyway. */
static int tell_use(PyObject *tensor)
{
    if (PyDict_GET_SIZE(kept_apart) == 0)
        return 0;
    StorageWatch *watch = watch_of_alias(tensor);
    if (watch != NULL) {
        watch->went_on = 1;
        times_changed++;
    }
    return PyErr_Occurred() ? -1 : 0;
}

int is_kept_apart(PyObject *tensor)
{
    if (PyDict_GET_SIZE(kept_apart) == 0)
        return 0;
    const StorageWatch *watch = watch_of_alias(tensor);
    return watch == NULL ? (PyErr_Occurred() ? -1 : 0) : !watch->went_on;
}

/* Nobody waits for the end of an object, or finds something by it: there are no weak references but ``ours``. */
static int is_unwatched(PyObject *object, PyObject *ours)
{
    if (!PyType_SUPPORTS_WEAKREFS(Py_TYPE(object)))
        return 1;
    PyWeakReference *first = *(PyWeakReference **)PyObject_GET_WEAKREFS_LISTPTR(object);
    return first == NULL || ((PyObject *)first == ours && first->wr_next == NULL && Py_REFCNT(ours) == 1);
}

/* Somebody got hold of the alias, or put it on other memory: 1, 0, -1. Whoever has it weakly does not use it, but may
   come to: then torch is asked each time. */
static int alias_is_held(StorageWatch *self)
{
    if (Py_REFCNT(self->again) != self->references || Py_REFCNT(self->storage) > self->objects)
        return 1;
    if (self->apart && !self->went_on)
        return 0;
    if (self->unused && is_unwatched(self->again, NULL) && is_unwatched(self->storage, NULL))
        return 0;
    long long number = number_of(PyObject_CallOneArg(self->uses, self->again));
    if (number < 0 || number != self->holders)
        return number < 0 ? -1 : 1;
    number = storage_holders((PyObject *)self);
    self->unused = number == self->alone;
    return number < 0 ? -1 : number != self->alone;
}

/* Somebody uses the storage: 1, 0, -1. */
static int is_held(StorageWatch *self)
{
    if (self->again != NULL)
        return alias_is_held(self);
    if (Py_REFCNT(self->storage) > self->objects)
        return 1;
    if (self->unused && is_unwatched(self->storage, NULL))
        return 0;
    long long number = storage_holders((PyObject *)self);
    self->unused = self->place != 0 && number >= 0 && number <= self->alone;
    return number < 0 ? -1 : number > self->alone;
}

int is_used(PyObject *watch)
{
    if (watch == Py_None)
        return 0;
    if (is_storage_watch(watch))
        return is_held((StorageWatch *)watch);
    PyObject *storage = PyObject_CallNoArgs(watch);
    int used = storage == NULL ? -1 : storage != Py_None;
    Py_XDECREF(storage);
    return used;
}

static PyObject *watch_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names)
{
    (void)args;
    StorageWatch *self = (StorageWatch *)object;
    if (PyVectorcall_NARGS(nargsf) || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "this takes no arguments");
        return NULL;
    }
    int used = is_held(self);
    return used < 0 ? NULL : Py_NewRef(used ? self->storage : Py_None);
}

/* Makes the alias that is handed out again, and notes its counts while nobody has it: 0, -1. */
static int make_again(StorageWatch *self)
{
    leave_apart(self);
    Py_CLEAR(self->again);
    forget_tensor(&self->known);
    PyObject *again = PyObject_GetAttr(self->first, s_data);
    if (again == NULL || know_tensor(again, &self->known) < 0 ||
        (self->holders = number_of(PyObject_CallOneArg(self->uses, again))) < 0) {
        Py_XDECREF(again);
        return -1;
    }
    self->references = Py_REFCNT(again);
    self->again = again;
    return 0;
}

/* The count that was found, or a lower one that others of its kind had, which is kept in ``lowest``: 0, -1. */
static int lower(PyObject *lowest, Py_ssize_t at, long long *count)
{
    long long known = PyLong_AsLongLong(PyList_GET_ITEM(lowest, at));
    if (known == -1 && PyErr_Occurred())
        return -1;
    if (known <= *count) {
        *count = known;
        return 0;
    }
    PyObject *found = PyLong_FromLongLong(*count);
    return found == NULL ? -1 : PyList_SetItem(lowest, at, found);
}

/* Counts while nobody uses it. A thread that lists all objects (``gc.get_objects``) may have these, too, just then: what
   it lets go of would hide a user that comes later. So the lowest counts hold that any watch of this kind had. */
static PyObject *watch_settle(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    StorageWatch *self = (StorageWatch *)object;
    if (count > 1 || (count == 1 && (!PyList_CheckExact(args[0]) || PyList_GET_SIZE(args[0]) != 4))) {
        PyErr_SetString(PyExc_TypeError, "it takes a list of four numbers, or nothing");
        return NULL;
    }
    if (self->first != NULL && make_again(self) < 0)
        return NULL;
    self->unused = 0;
    self->alone = storage_holders(object);
    if (self->alone < 0)
        return NULL;
    long long counts[] = {self->alone, Py_REFCNT(self->storage), self->references, self->holders};
    for (Py_ssize_t i = 0; count == 1 && i < 4; i++)
        if (lower(args[0], i, &counts[i]) < 0)
            return NULL;
    self->alone = counts[0];
    self->objects = (Py_ssize_t)counts[1];
    self->references = (Py_ssize_t)counts[2];
    self->holders = counts[3];
    return PyLong_FromLongLong(self->alone - (self->again != NULL));
}

/* Users left nothing on a tensor that they had: no gradient or hook, no attribute, no weak reference. */
static int is_left_alone(StorageWatch *self, PyObject *ours)
{
    return is_unwatched(self->again, ours) && has_nothing_on_it(self->again);
}

static PyObject *watch_part(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    StorageWatch *self = (StorageWatch *)object;
    self->unused = 0;
    if (self->again != NULL) {
        leave_apart(self);
        self->alone -= 1;
        Py_CLEAR(self->again);
    }
    Py_RETURN_NONE;
}

/* The alias if nobody has it and it is as it was made: a new reference; NULL without an exception. ``ours``: the weak
   reference to it that is known, or NULL. */
static PyObject *taken_again(PyObject *watch, PyObject *ours)
{
    StorageWatch *self = (StorageWatch *)watch;
    if (!is_storage_watch(watch) || self->again == NULL)
        return NULL;
    int known = self->apart && !self->went_on;
    int free = alias_is_held(self) == 0 && (known || is_as_known(self->again, &self->known) == 1);
    put_off_error();
    if (!free)
        return NULL;
    times_changed += (uint64_t)(self->apart && self->went_on);
    self->went_on = self->unused = 0;
    if (self->shown && !is_left_alone(self, ours)) {
        Py_DECREF(watch_part(watch, NULL)); /* weak references end */
        return NULL;
    }
    return Py_NewRef(self->again);
}

/* Who gets it keeps it apart from now on. What is handed out now is not known to be. */
static PyObject *watch_keep_apart(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    StorageWatch *self = (StorageWatch *)object;
    if (self->again == NULL || self->shown || self->apart)
        Py_RETURN_NONE;
    PyObject *key = PyLong_FromVoidPtr(self->again), *mine = key == NULL ? NULL : PyLong_FromVoidPtr(self);
    int failed = mine == NULL || PyDict_SetItem(kept_apart, key, mine) < 0;
    Py_XDECREF(key);
    Py_XDECREF(mine);
    if (failed)
        return NULL;
    self->apart = self->went_on = 1;
    Py_RETURN_NONE;
}

static PyObject *watch_again(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    PyObject *again = taken_again(object, NULL);
    return again == NULL ? Py_NewRef(Py_None) : again;
}

static PyObject *watch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"count", "storage", "address", "first", "uses", "shown", NULL};
    PyObject *count, *storage, *address, *first = Py_None, *uses = Py_None;
    int shown = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOO!|OOp", names, &count, &storage, &PyLong_Type, &address, &first, &uses, &shown))
        return NULL;
    if (first != Py_None && (!is_plain_tensor(first) || !PyCallable_Check(uses))) {
        PyErr_SetString(PyExc_TypeError, "only a plain tensor whose uses are counted is handed out again");
        return NULL;
    }
    StorageWatch *self = (StorageWatch *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    PyObject *given = PyTuple_Pack(1, address);
    if (given == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    self->count = caller_of(count, given);
    Py_DECREF(given);
    self->storage = Py_NewRef(storage);
    self->uses = Py_NewRef(uses);
    self->vectorcall = watch_call;
    self->shown = shown;
    self->first = first == Py_None ? NULL : Py_NewRef(first);
    return (PyObject *)self;
}

static int watch_traverse(PyObject *object, visitproc visit, void *arg)
{
    StorageWatch *self = (StorageWatch *)object;
    Py_VISIT(self->count.function);
    Py_VISIT(self->count.arguments);
    Py_VISIT(self->storage);
    Py_VISIT(self->first);
    Py_VISIT(self->again);
    Py_VISIT(self->uses);
    return 0;
}

/* Nothing is cleared to break a cycle: a storage's object and the tensors lead nowhere. */
static void watch_dealloc(PyObject *object)
{
    StorageWatch *self = (StorageWatch *)object;
    PyObject_GC_UnTrack(object);
    leave_apart(self);
    forget_caller(&self->count);
    Py_XDECREF(self->storage);
    Py_XDECREF(self->first);
    Py_XDECREF(self->again);
    Py_XDECREF(self->uses);
    forget_tensor(&self->known);
    Py_TYPE(object)->tp_free(object);
}

/* The first tensor lies where it was made, which the watch knows from then on: 1, 0, -1. */
static int is_in_place(PyObject *first, PyObject *shared, StorageWatch *watch)
{
    uint64_t address = 0, expected = watch == NULL ? 0 : watch->place;
    if (expected == 0) {
        PyObject *known = SLOT(shared, SharedStorage, address);
        expected = known == NULL ? 0 : PyLong_AsUnsignedLongLong(known);
        if (PyErr_Occurred())
            return -1;
    }
    if (is_plain_tensor(first)) {
        if (!read_address(first, &address))
            return 0;
    } else if (address_of(first, &address) < 0)
        return -1;
    if (address == expected && watch != NULL)
        watch->place = address;
    return address == expected;
}

/* ``Source.tensor`` where the first tensor is still what it was, else NULL without an exception. */
static PyObject *alias_of(PyObject *source, PyObject *watch, PyObject *ours)
{
    if (!is_of(source, slots.SharedStorage.type))
        return NULL;
    PyObject *held = SLOT(source, SharedStorage, held), *first, *result;
    if (held == NULL || watch != held)
        return NULL;
    Py_INCREF(held); /* the end of an alias may run Python */
    result = taken_again(held, ours);
    Py_DECREF(held);
    if (result != NULL || (first = SLOT(source, SharedStorage, first)) == NULL || first == Py_None)
        return result;
    Py_INCREF(first);
    StorageWatch *known = is_storage_watch(watch) ? (StorageWatch *)watch : NULL;
    if (is_in_place(first, source, known) > 0) {
        if (known != NULL) {
            known->unused = 0;
            known->went_on |= known->apart; /* the alias may be let go of while this one is in use */
            times_changed += (uint64_t)known->apart;
        }
        result = PyObject_GetAttr(first, s_data);
    }
    Py_DECREF(first);
    return result;
}

/* The one weak reference to what was handed out last of a group of one tensor, or NULL: borrowed. */
static PyObject *known_reference(PyObject *tensors, Py_ssize_t number)
{
    PyObject *known = tensors == NULL || number >= PyList_GET_SIZE(tensors) ? NULL : PyList_GET_ITEM(tensors, number);
    return known != NULL && PyList_CheckExact(known) && PyList_GET_SIZE(known) == 1 ? PyList_GET_ITEM(known, 0) : NULL;
}

/* ``OutputPlan._hand_out``: the tensor is known by a weak reference. */
static int note_tensor(PyObject *tensors, Py_ssize_t number, PyObject *tensor)
{
    PyObject *reference = PyWeakref_NewRef(tensor, NULL);
    if (reference != NULL && known_reference(tensors, number) == reference) { /* handed out again */
        Py_DECREF(reference);
        return 0;
    }
    PyObject *known = reference == NULL ? NULL : PyList_New(1);
    if (known == NULL) {
        Py_XDECREF(reference);
        return -1;
    }
    PyList_SET_ITEM(known, 0, reference);
    return PyList_SetItem(tensors, number, known);
}

/* What a replay left for its caller alone; NULL without an exception where there is no single tensor. */
static PyObject *taken_from(PyObject *places, PyObject *name)
{
    Py_ssize_t number = PyLong_AsSsize_t(name);
    PyObject *found = !PyList_CheckExact(places) || number < 0 || number >= PyList_GET_SIZE(places)
                          ? NULL
                          : PyList_GET_ITEM(places, number);
    if (found == NULL || found == Py_None || PyList_CheckExact(found))
        return NULL;
    PyList_SET_ITEM(places, number, Py_NewRef(Py_None)); /* the place's reference goes to the caller */
    return found;
}

/* The next tensor of a source, which may be asked for as it stands; NULL without an exception: Python has to. */
static PyObject *handed_out(PyObject *source, PyObject *live, Py_ssize_t number, PyObject *tensors)
{
    if (source == Py_None || number >= PyList_GET_SIZE(live))
        return NULL;
    if (PyTuple_CheckExact(source) && PyTuple_GET_SIZE(source) == 2)
        return taken_from(PyTuple_GET_ITEM(source, 0), PyTuple_GET_ITEM(source, 1));
    PyObject *result = alias_of(source, PyList_GET_ITEM(live, number), known_reference(tensors, number));
    if (result != NULL && tensors != NULL && note_tensor(tensors, number, result) < 0)
        Py_CLEAR(result);
    return result;
}

/* Has the owned outputs made, where a replay leaves none: 0, -1. */
static int collect_owned(NodeView *view)
{
    if (view->collect == Py_None)
        return 0;
    PyObject *done = PyObject_CallNoArgs(view->collect);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

PyObject *single_output(NodeView *view)
{
    return collect_owned(view) < 0 ? NULL : handed_out(view->source, view->live, 0, view->preserving ? NULL : view->tensors);
}

/* Puts the next tensors of these groups into values; gives the groups that are left to Python. */
static PyObject *put_tensors(
    PyObject *sources, PyObject *live, PyObject *positions, PyObject *values, PyObject *numbers, PyObject *tensors)
{
    PyObject *left = PyList_New(0);
    for (Py_ssize_t i = 0; left != NULL && i < PyTuple_GET_SIZE(numbers); i++) {
        PyObject *name = PyTuple_GET_ITEM(numbers, i);
        Py_ssize_t number = PyLong_AsSsize_t(name);
        Py_ssize_t position = number < 0 || number >= PyTuple_GET_SIZE(positions)
                                  ? -1
                                  : PyLong_AsSsize_t(PyTuple_GET_ITEM(positions, number));
        if (position < 0 || number >= PyTuple_GET_SIZE(sources)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_IndexError, "no such group");
            Py_CLEAR(left);
            break;
        }
        PyObject *made = handed_out(PyTuple_GET_ITEM(sources, number), live, number, tensors);
        int failed = made == NULL ? PyErr_Occurred() || PyList_Append(left, name) < 0
                                  : PyList_SetItem(values, position, made) < 0;
        if (failed)
            Py_CLEAR(left);
    }
    return left;
}

static PyObject *hand_out(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *sources, *live, *positions, *values, *numbers, *tensors;
    if (!PyArg_ParseTuple(
            args, "O!O!O!O!O!O", &PyTuple_Type, &sources, &PyList_Type, &live, &PyTuple_Type, &positions, &PyList_Type,
            &values, &PyTuple_Type, &numbers, &tensors))
        return NULL;
    return put_tensors(sources, live, positions, values, numbers, PyList_Check(tensors) ? tensors : NULL);
}

/* Pairs of a position and a value, or of a position and an earlier one with the value. */
static int put_pairs(PyObject *pairs, PyObject *values, int are_positions)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs); i++) {
        PyObject *pair = PyTuple_GET_ITEM(pairs, i), *value = PyTuple_GET_ITEM(pair, 1);
        Py_ssize_t from = are_positions ? PyLong_AsSsize_t(value) : 0;
        value = are_positions ? PyList_GetItem(values, from) : value;
        if (value == NULL || PyList_SetItem(values, PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 0)), Py_NewRef(value)) < 0)
            return -1;
    }
    return 0;
}

/* Puts what the host read in the replay into values: 0, -1. ``reads``: a list, and for each value its position, its place
   in the list, and a function that it goes through, or None; or empty. */
static int put_reads(PyObject *reads, PyObject *values)
{
    PyObject *list = PyTuple_GET_SIZE(reads) == 2 ? PyTuple_GET_ITEM(reads, 0) : NULL, *all = list == NULL ? NULL : PyTuple_GET_ITEM(reads, 1);
    for (Py_ssize_t i = 0; list != NULL && i < PyTuple_GET_SIZE(all); i++) {
        PyObject *one = PyTuple_GET_ITEM(all, i), *kind = PyTuple_GET_ITEM(one, 2);
        PyObject *value = PyList_GetItem(list, PyLong_AsSsize_t(PyTuple_GET_ITEM(one, 1)));
        if (value == NULL)
            return -1;
        Py_INCREF(value);
        if (kind != Py_None)
            Py_SETREF(value, PyObject_CallOneArg(kind, value));
        if (value == NULL || PyList_SetItem(values, PyLong_AsSsize_t(PyTuple_GET_ITEM(one, 0)), value) < 0)
            return -1;
    }
    return 0;
}

/* What was taken from its place goes back there: whoever asks again finds it. */
static void give_back(PyObject *sources, PyObject *positions, PyObject *values, PyObject *numbers)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(numbers); i++) {
        Py_ssize_t number = PyLong_AsSsize_t(PyTuple_GET_ITEM(numbers, i));
        if (number < 0 || number >= PyTuple_GET_SIZE(sources) || number >= PyTuple_GET_SIZE(positions))
            break;
        PyObject *source = PyTuple_GET_ITEM(sources, number);
        Py_ssize_t position = PyLong_AsSsize_t(PyTuple_GET_ITEM(positions, number));
        if (!PyTuple_CheckExact(source) || position < 0 || position >= PyList_GET_SIZE(values))
            continue;
        PyObject *places = PyTuple_GET_ITEM(source, 0), *made = PyList_GET_ITEM(values, position);
        Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(source, 1));
        if (made != Py_None && PyList_GetItem(places, place) == Py_None)
            PyList_SetItem(places, place, Py_NewRef(made));
    }
    PyErr_Restore(type, error, traceback);
}

/* ``Alias.build`` of the call's tensor, or of the static one with this name: a new reference. */
static PyObject *alias_built(
    PyObject *alias, PyObject *of, PyObject *statics, PyObject *const *tensors, Py_ssize_t count)
{
    PyObject *base;
    if (PyLong_Check(of)) {
        Py_ssize_t number = PyLong_AsSsize_t(of);
        if (number < 0 || number >= count) {
            PyErr_SetString(PyExc_IndexError, "no such argument");
            return NULL;
        }
        if (tell_use(tensors[number]) < 0)
            return NULL;
        base = Py_NewRef(tensors[number]);
    } else
        base = PyObject_GetItem(statics, of);
    if (base == NULL || alias == Py_None) /* the very tensor */
        return base;
    PyObject *built = PyObject_CallMethodOneArg(alias, s_build, base);
    Py_DECREF(base);
    return built;
}

/* Puts results that are tensors of the call, or lie on the memory of one, into values: 0, -1. ``aliases``: of each its
   position, what it is an alias of, and an ``Alias``, or None for the same tensor. */
static int put_aliases(
    PyObject *aliases, PyObject *values, PyObject *statics, PyObject *const *tensors, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(aliases); i++) {
        PyObject *one = PyTuple_GET_ITEM(aliases, i);
        PyObject *made =
            alias_built(PyTuple_GET_ITEM(one, 2), PyTuple_GET_ITEM(one, 1), statics, tensors, count);
        if (made == NULL || PyList_SetItem(values, PyLong_AsSsize_t(PyTuple_GET_ITEM(one, 0)), made) < 0)
            return -1;
    }
    return 0;
}

PyObject *several_outputs(
    NodeView *view, PyObject *pool, PyObject *statics, PyObject *const *tensors, Py_ssize_t num_tensors)
{
    PyObject *plan = view->several, *result = NULL, *left = NULL, *done = NULL;
    Py_ssize_t count = PyLong_AsSsize_t(PyTuple_GET_ITEM(plan, 6));
    PyObject *values = count < 0 ? NULL : PyList_New(count);
    for (Py_ssize_t i = 0; values != NULL && i < count; i++)
        PyList_SET_ITEM(values, i, Py_NewRef(Py_None));
    if (values != NULL && collect_owned(view) == 0)
        left = put_tensors(
            PyTuple_GET_ITEM(plan, 0), view->live, PyTuple_GET_ITEM(plan, 1), values, PyTuple_GET_ITEM(plan, 2),
            view->preserving ? NULL : view->tensors);
    if (left != NULL && PyList_GET_SIZE(left)) {
        PyObject *args[] = {view->outputs, pool, values, left};
        done = PyObject_VectorcallMethod(s_build_left, args, 4, NULL);
        if (done == NULL)
            Py_CLEAR(left);
    }
    if (left != NULL && put_aliases(PyTuple_GET_ITEM(plan, 7), values, statics, tensors, num_tensors) == 0 &&
        put_pairs(PyTuple_GET_ITEM(plan, 3), values, 0) == 0 && put_reads(PyTuple_GET_ITEM(plan, 8), values) == 0 &&
        put_pairs(PyTuple_GET_ITEM(plan, 4), values, 1) == 0)
        result = PyObject_CallOneArg(PyTuple_GET_ITEM(plan, 5), values);
    if (result == NULL && values != NULL)
        give_back(PyTuple_GET_ITEM(plan, 0), PyTuple_GET_ITEM(plan, 1), values, PyTuple_GET_ITEM(plan, 2));
    Py_XDECREF(done);
    Py_XDECREF(left);
    Py_XDECREF(values);
    return result;
}

static PyMethodDef watch_methods[] = {
    {"settle", (PyCFunction)(void (*)(void))watch_settle, METH_FASTCALL, "Nobody uses it now: gives the number of its holders."},
    {"part", watch_part, METH_NOARGS, "The alias is handed out no more: who has it has it alone."},
    {"keep_apart", watch_keep_apart, METH_NOARGS, "Who gets the alias has it alone from now on, or tells of it."},
    {"again", watch_again, METH_NOARGS, "The alias that is handed out again, if nobody has it, else None."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject StorageWatchType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.StorageWatch",
    .tp_doc = "Gives a storage while somebody uses it, else None.",
    .tp_basicsize = sizeof(StorageWatch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(StorageWatch, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_methods = watch_methods,
    .tp_new = watch_new,
    .tp_dealloc = watch_dealloc,
    .tp_traverse = watch_traverse,
};

static PyObject *tell_uses(PyObject *module, PyObject *tensors)
{
    (void)module;
    PyObject *all = PySequence_Fast(tensors, "a sequence of tensors");
    int failed = all == NULL;
    for (Py_ssize_t i = 0; !failed && i < PySequence_Fast_GET_SIZE(all); i++)
        failed = tell_use(PySequence_Fast_GET_ITEM(all, i)) < 0;
    Py_XDECREF(all);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef functions[] = {
    {"tell_uses", tell_uses, METH_O, "Others than a replay get these: they may be in use without a reference of Python's."},
    {"hand_out", hand_out, METH_VARARGS, "Put the next tensors of sources into values; gives the groups left over."},
    {NULL, NULL, 0, NULL},
};

int add_held(PyObject *module)
{
    NAMES(INTERN)
    if ((kept_apart = PyDict_New()) == NULL)
        return -1;
    if (PyType_Ready(&StorageWatchType) < 0 || PyModule_AddObjectRef(module, "StorageWatch", (PyObject *)&StorageWatchType) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
