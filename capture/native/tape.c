/* The tape of the CPU engine: calls that run one after the other, with arguments that were laid out before.

   A step is a function, its arguments, and the places of its results. Registers are the members of a Python list, which the
   engine changes when tensors move; locals are results that are needed only during the replay. */
#include "native.h"

#include <structmember.h>

#define NAMES(X) X(copy_) X(data)
NAMES(DECLARE)

enum { NOTHING, CONSTANT, REGISTER, LOCAL, LEAF, LEAVES, LIST, TUPLE, EXPECTED };
static const char *const kinds[] = {
    "nothing", "constant", "register", "local", "leaf", "leaves", "list", "tuple", "expected"};
#define KINDS (int)(sizeof(kinds) / sizeof(*kinds))

typedef struct Template {
    int kind;
    Py_ssize_t number; /* of a register, local or leaf; how many members a list or tuple has */
    PyObject *value;   /* a constant; a result that has to come again */
    struct Template *members;
} Template;

typedef struct {
    PyObject *function; /* a text: the method of this name of the first argument */
    PyObject *names;    /* of the arguments by keyword, the last ones; or NULL */
    Template arguments, results;
    int is_single; /* else the step returns a sequence, a member for each of ``results`` */
} Step;

/* A register that is another tensor in every call, which is left to the caller afterwards. */
typedef struct {
    Py_ssize_t at; /* of the register */
    PyObject *make;
    PyObject *places; /* a list */
    Py_ssize_t number; /* of its place */
} Owned;

/* A local that is left to the caller. */
typedef struct {
    Py_ssize_t local;
    PyObject *places; /* a list */
    Py_ssize_t number; /* of its place */
} Given;

typedef struct {
    PyObject_HEAD
    PyObject *registers; /* a list */
    PyObject *grad;      /* a function: sets grad mode; None if it is left as it is */
    Py_ssize_t count, locals, most; /* ``most``: arguments of one step */
    Py_ssize_t acts;    /* steps before the first that does what its caller may see: writes, or draws */
    Py_ssize_t back;    /* the last steps, which bring to the caller's tensors what was written to copies of them */
    Py_ssize_t undo;    /* steps after those, which put back what others wrote before a step that may be ``parted`` */
    int parted;         /* a step gave another result than was expected, and nobody took over since */
    Py_ssize_t stopped; /* the step that raised in the last replay, or -1 */
    PyObject *left;     /* what that one left beside its registers: locals, and tensors for owned ones; or NULL */
    Step *steps;
    Py_ssize_t owners;
    Owned *owned;
    Py_ssize_t givers;
    Given *given;
    vectorcallfunc vectorcall;
} Tape;

/* What one call of a tape has of its own. */
typedef struct {
    PyObject *registers, *leaves;
    PyObject **locals;
    PyObject **arguments; /* the place before the first one is for who is called */
} Run;

static PyTypeObject TapeType;
static PyObject *Parted; /* a class of errors */

/* ------------------------------------------------------------------------------------------------------ replays */

static PyObject *value_of(const Template *one, const Run *run);

static PyObject *register_of(Py_ssize_t number, const Run *run)
{
    if (number < PyList_GET_SIZE(run->registers)) {
        PyObject *found = PyList_GET_ITEM(run->registers, number);
        if (found != Py_None) /* what is called may change the list, so the caller holds what it took from there */
            return Py_NewRef(found);
    }
    PyErr_SetString(PyExc_RuntimeError, "this recording was released");
    return NULL;
}

static PyObject *members_of(const Template *one, const Run *run)
{
    PyObject *found = one->kind == LIST ? PyList_New(one->number) : PyTuple_New(one->number);
    for (Py_ssize_t i = 0; found != NULL && i < one->number; i++) {
        PyObject *member = value_of(&one->members[i], run);
        if (member == NULL)
            Py_CLEAR(found);
        else if (one->kind == LIST)
            PyList_SET_ITEM(found, i, member);
        else
            PyTuple_SET_ITEM(found, i, member);
    }
    return found;
}

/* A new reference, or NULL with an exception set. */
static PyObject *value_of(const Template *one, const Run *run)
{
    switch (one->kind) {
    case CONSTANT:
        return Py_NewRef(one->value);
    case REGISTER:
        return register_of(one->number, run);
    case LOCAL:
        if (run->locals[one->number] == NULL)
            PyErr_SetString(PyExc_RuntimeError, "a step reads what none before it gave");
        return Py_XNewRef(run->locals[one->number]);
    case LEAF:
        return PySequence_GetItem(run->leaves, one->number);
    case LEAVES:
        return Py_NewRef(run->leaves);
    default:
        return members_of(one, run);
    }
}

/* A result goes where it belongs: 0, or -1 with an exception set. */
static int receive(const Template *target, PyObject *result, const Run *run)
{
    if (target->kind == LOCAL) {
        Py_XSETREF(run->locals[target->number], Py_NewRef(result));
        return 0;
    }
    if (target->kind == EXPECTED) {
        int same = same_value(result, target->value);
        if (same == 0) {
            PyObject *args = Py_BuildValue("nO", target->number, result);
            PyErr_SetObject(Parted, args);
            Py_XDECREF(args);
        }
        return same > 0 ? 0 : -1;
    }
    if (target->kind != REGISTER)
        return 0;
    PyObject *place = register_of(target->number, run);
    if (place == NULL)
        return -1;
    PyObject *both[] = {NULL, place, result};
    PyObject *done = PyObject_VectorcallMethod(s_copy_, both + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_DECREF(place);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static int receive_several(const Step *step, PyObject *result, const Run *run)
{
    PyObject *several = PySequence_Tuple(result); /* of its own: a copy may run code that changes a list */
    int failed = several == NULL;
    if (!failed && PyTuple_GET_SIZE(several) != step->results.number) {
        PyErr_Format(PyExc_ValueError, "an operator gave %zd results where it gave %zd when it was recorded",
            PyTuple_GET_SIZE(several), step->results.number);
        failed = 1;
    }
    for (Py_ssize_t i = 0; !failed && i < step->results.number; i++)
        failed = receive(&step->results.members[i], PyTuple_GET_ITEM(several, i), run) < 0;
    Py_XDECREF(several);
    return failed ? -1 : 0;
}

static int run_step(const Step *step, const Run *run)
{
    PyObject **arguments = run->arguments, *result = NULL;
    Py_ssize_t count = step->arguments.number, ready = 0;
    while (ready < count && (arguments[ready] = value_of(&step->arguments.members[ready], run)) != NULL)
        ready++;
    if (ready == count) {
        size_t given = (size_t)(count - (step->names == NULL ? 0 : PyTuple_GET_SIZE(step->names)));
        given |= PY_VECTORCALL_ARGUMENTS_OFFSET;
        if (PyUnicode_Check(step->function))
            result = PyObject_VectorcallMethod(step->function, arguments, given, step->names);
        else
            result = PyObject_Vectorcall(step->function, arguments, given, step->names);
    }
    while (ready)
        Py_DECREF(arguments[--ready]);
    if (result == NULL)
        return -1;
    int failed = 0;
    if (!step->is_single)
        failed = receive_several(step, result, run);
    else if (step->results.number)
        failed = receive(step->results.members, result, run);
    Py_DECREF(result);
    return failed;
}

/* All that was written so far comes to the caller's tensors, also where a step ``failed``: eager's are written at once.
   0, -1. */
static int bring_back(const Tape *self, const Run *run, int failed)
{
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    Commit commit;
    if (failed)
        PyErr_Fetch(&type, &value, &traceback);
    commit_begin(&commit);
    commit.ran = 1;
    int ended = 1;
    Py_ssize_t end = self->count - self->undo;
    for (Py_ssize_t i = end - self->back; ended && i < end; i++)
        do
            ended = run_step(&self->steps[i], run) == 0;
        while (!ended && commit_puts_off(&commit));
    commit_end(&commit);
    if (failed) {
        PyErr_Clear();
        PyErr_Restore(type, value, traceback);
    } else
        ended = ended && commit_handed_up(&commit) == 0;
    Py_XDECREF(commit.errors);
    return ended && !failed ? 0 : -1;
}

/* What a replay that raised has made, for who goes on from there. An error of its own leaves nothing. */
static void leave(Tape *self, PyObject *const *locals)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *made = PyTuple_New(self->locals), *owned = PyTuple_New(self->owners);
    for (Py_ssize_t i = 0; made != NULL && i < self->locals; i++)
        PyTuple_SET_ITEM(made, i, Py_NewRef(locals[i] == NULL ? Py_None : locals[i]));
    for (Py_ssize_t i = 0; owned != NULL && i < self->owners; i++) {
        Py_ssize_t at = self->owned[i].at;
        PyTuple_SET_ITEM(owned, i, Py_NewRef(at < PyList_GET_SIZE(self->registers) ? PyList_GET_ITEM(self->registers, at) : Py_None));
    }
    if (made != NULL && owned != NULL)
        Py_XSETREF(self->left, PyTuple_Pack(2, made, owned));
    Py_XDECREF(made);
    Py_XDECREF(owned);
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
}

/* ``list[at] = item``, which is given up: 0, or -1 with an exception set. */
static int put_item(PyObject *list, Py_ssize_t at, PyObject *item)
{
    return item == NULL ? -1 : PyList_SetItem(list, at, item);
}

/* What steps gave to locals, and a caller is to have: 0, -1. ``parted``: some of them did not run. */
static int leave_given(const Tape *self, PyObject *const *locals, int parted)
{
    for (Py_ssize_t i = 0; i < self->givers; i++) {
        const Given *one = &self->given[i];
        PyObject *value = locals[one->local] == NULL && parted ? Py_None : locals[one->local];
        if (put_item(one->places, one->number, Py_XNewRef(value)) < 0)
            return -1;
    }
    return 0;
}

static int run_steps(Tape *self, PyObject *leaves)
{
    PyObject **room = PyMem_Calloc(self->locals + self->most + 1, sizeof(PyObject *));
    if (room == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    Run run = {self->registers, leaves, room, room + self->locals + 1};
    int failed = 0, parted = 0;
    Py_ssize_t i = 0, end = self->count - self->undo - self->back;
    self->stopped = -1;
    self->parted = 0;
    Py_CLEAR(self->left);
    for (; !failed && i < end; i++) {
        failed = run_step(&self->steps[i], &run) < 0;
        parted = failed && PyErr_ExceptionMatches(Parted);
        if (failed)
            self->stopped = parted ? -1 : i;
        else if (i < self->acts) /* Ctrl-C ends a long replay, as it ends eager code, while none of it can be seen */
            failed = PyErr_CheckSignals() < 0;
    }
    if (self->back && (!failed || (!parted && self->stopped >= self->acts)))
        failed = bring_back(self, &run, failed) < 0;
    if (self->stopped >= 0)
        leave(self, room);
    if (!failed || parted)
        failed = leave_given(self, room, parted) < 0 || failed;
    self->parted = parted;
    for (Py_ssize_t i = 0; i < self->locals; i++)
        Py_XDECREF(room[i]);
    PyMem_Free(room);
    return failed ? -1 : 0;
}

/* The registers keep no hold of what a call gave. Users get an alias, which has seen no write. 0, -1. */
static int leave_owned(const Tape *self, int failed)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    for (Py_ssize_t i = 0; i < self->owners; i++) {
        const Owned *one = &self->owned[i];
        PyObject *made = one->at < PyList_GET_SIZE(self->registers) ? PyList_GET_ITEM(self->registers, one->at) : Py_None;
        Py_INCREF(made);
        PyObject *given = failed || made == Py_None ? Py_NewRef(Py_None) : PyObject_GetAttr(made, s_data);
        failed |= put_item(one->places, one->number, given) < 0;
        Py_DECREF(made);
        failed |= put_item(self->registers, one->at, Py_NewRef(Py_None)) < 0;
    }
    if (type != NULL)
        PyErr_Restore(type, value, traceback);
    return failed ? -1 : 0;
}

static int run_with_owned(Tape *self, PyObject *leaves)
{
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && i < self->owners; i++)
        failed = put_item(self->registers, self->owned[i].at, PyObject_CallNoArgs(self->owned[i].make)) < 0;
    failed = failed || run_steps(self, leaves) < 0;
    return self->owners ? leave_owned(self, failed) : (failed ? -1 : 0);
}

static int set_grad(const Tape *self, PyObject *mode)
{
    PyObject *done = PyObject_CallOneArg(self->grad, mode);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

void tape_put_back(PyObject *object)
{
    Tape *self = (Tape *)object;
    if (Py_TYPE(object) != &TapeType || !self->parted)
        return;
    PyObject **room = PyMem_Calloc(self->locals + self->most + 1, sizeof(PyObject *)), *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Run run = {self->registers, Py_None, room, room == NULL ? NULL : room + self->locals + 1};
    for (Py_ssize_t i = self->count - self->undo; room != NULL && i < self->count; i++)
        if (run_step(&self->steps[i], &run) < 0)
            PyErr_WriteUnraisable(object);
    self->parted = 0;
    PyMem_Free(room);
    PyErr_Restore(type, value, traceback);
}

static PyObject *put_back(PyObject *object, PyObject *Py_UNUSED(nothing))
{
    tape_put_back(object);
    Py_RETURN_NONE;
}

static PyObject *tape_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Tape *self = (Tape *)object;
    if (PyVectorcall_NARGS(nargsf) != 1 || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "a tape takes the leaves of a call");
        return NULL;
    }
    if (self->grad != Py_None && set_grad(self, Py_False) < 0)
        return NULL;
    int failed = run_with_owned(self, args[0]) < 0;
    if (self->grad != Py_None) {
        PyObject *type, *value, *traceback; /* what a step raised goes on to the caller once the mode is as it was */
        PyErr_Fetch(&type, &value, &traceback);
        int kept = set_grad(self, Py_True);
        if (kept == 0)
            PyErr_Restore(type, value, traceback);
        else {
            Py_XDECREF(type);
            Py_XDECREF(value);
            Py_XDECREF(traceback);
        }
        failed |= kept < 0;
    }
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------------------------------------- construction */

static int read_template(Template *one, PyObject *given, Tape *tape);

/* Members that were read so far are counted, so that giving up frees them and no other. */
static int read_members(Template *one, PyObject *given, Tape *tape)
{
    if (!PyTuple_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "several templates are a tuple");
        return -1;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(given);
    one->members = PyMem_Calloc(count + 1, sizeof(Template));
    if (one->members == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        one->number = i + 1;
        if (read_template(&one->members[i], PyTuple_GET_ITEM(given, i), tape) < 0)
            return -1;
    }
    return 0;
}

static int read_number(Template *one, PyObject *given, Tape *tape)
{
    one->number = PyLong_AsSsize_t(given);
    if (one->number < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "places count from zero");
        return -1;
    }
    if (one->kind == LOCAL && one->number >= tape->locals)
        tape->locals = one->number + 1;
    return 0;
}

/* ``(kind, value)``: 0, or -1 with an exception set. */
static int read_template(Template *one, PyObject *given, Tape *tape)
{
    PyObject *name, *value;
    if (!PyTuple_Check(given) || !PyArg_ParseTuple(given, "UO", &name, &value)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a template is a kind and a value");
        return -1;
    }
    int kind = 0;
    while (kind < KINDS && PyUnicode_CompareWithASCIIString(name, kinds[kind]) != 0)
        kind++;
    if (kind == KINDS) {
        PyErr_Format(PyExc_ValueError, "no template is a %R", name);
        return -1;
    }
    one->kind = kind;
    if (kind == LIST || kind == TUPLE)
        return read_members(one, value, tape);
    if (kind == REGISTER || kind == LOCAL || kind == LEAF)
        return read_number(one, value, tape);
    if (kind == CONSTANT)
        one->value = Py_NewRef(value);
    if (kind == EXPECTED) {
        if (!PyTuple_Check(value) || !PyArg_ParseTuple(value, "nO", &one->number, &value))
            return -1;
        one->value = Py_NewRef(value);
    }
    return 0;
}

static int read_step(Step *step, PyObject *given, Tape *tape)
{
    PyObject *function, *arguments, *names, *results;
    if (!PyTuple_Check(given) ||
        !PyArg_ParseTuple(given, "OOO!Op", &function, &arguments, &PyTuple_Type, &names, &results, &step->is_single)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a step is a tuple");
        return -1;
    }
    step->function = Py_NewRef(function);
    step->names = PyTuple_GET_SIZE(names) ? Py_NewRef(names) : NULL;
    step->arguments.kind = step->results.kind = TUPLE;
    if (read_members(&step->arguments, arguments, tape) < 0 || read_members(&step->results, results, tape) < 0)
        return -1;
    Py_ssize_t by_position = step->arguments.number - PyTuple_GET_SIZE(names);
    if (by_position < PyUnicode_Check(function) || (step->is_single && step->results.number > 1)) {
        PyErr_SetString(PyExc_ValueError, "a step has fewer arguments, or more results, than it needs");
        return -1;
    }
    if (step->arguments.number > tape->most)
        tape->most = step->arguments.number;
    return 0;
}

static int visit_template(const Template *one, visitproc visit, void *arg)
{
    Py_VISIT(one->value);
    for (Py_ssize_t i = 0; one->members != NULL && i < one->number; i++) {
        int stopped = visit_template(&one->members[i], visit, arg);
        if (stopped)
            return stopped;
    }
    return 0;
}

static void forget_template(Template *one)
{
    for (Py_ssize_t i = 0; one->members != NULL && i < one->number; i++)
        forget_template(&one->members[i]);
    PyMem_Free(one->members);
    one->members = NULL;
    Py_CLEAR(one->value);
}

static int tape_traverse(PyObject *object, visitproc visit, void *arg)
{
    const Tape *self = (Tape *)object;
    Py_VISIT(self->registers);
    Py_VISIT(self->grad);
    Py_VISIT(self->left);
    for (Py_ssize_t i = 0; i < self->owners; i++) {
        Py_VISIT(self->owned[i].make);
        Py_VISIT(self->owned[i].places);
    }
    for (Py_ssize_t i = 0; i < self->givers; i++)
        Py_VISIT(self->given[i].places);
    for (Py_ssize_t i = 0; i < self->count; i++) {
        const Step *step = &self->steps[i];
        Py_VISIT(step->function);
        Py_VISIT(step->names);
        int stopped = visit_template(&step->arguments, visit, arg);
        if (stopped)
            return stopped;
    }
    return 0;
}

static int tape_clear(PyObject *object)
{
    Tape *self = (Tape *)object;
    Py_CLEAR(self->left);
    while (self->count) {
        Step step = self->steps[--self->count];
        forget_template(&step.arguments);
        forget_template(&step.results);
        Py_XDECREF(step.function);
        Py_XDECREF(step.names);
    }
    while (self->owners) {
        Owned one = self->owned[--self->owners];
        Py_DECREF(one.make);
        Py_DECREF(one.places);
    }
    while (self->givers) {
        PyObject *places = self->given[--self->givers].places;
        Py_DECREF(places);
    }
    return 0;
}

static void tape_dealloc(PyObject *object)
{
    Tape *self = (Tape *)object;
    PyObject_GC_UnTrack(object);
    tape_clear(object);
    PyMem_Free(self->steps);
    PyMem_Free(self->owned);
    PyMem_Free(self->given);
    Py_XDECREF(self->registers);
    Py_XDECREF(self->grad);
    Py_TYPE(object)->tp_free(object);
}

/* ``(register, make, places, number)``: 0, or -1 with an exception set. */
static int read_owned(Tape *self, PyObject *given)
{
    Py_ssize_t at, number;
    PyObject *make, *places;
    if (!PyTuple_Check(given) || !PyArg_ParseTuple(given, "nOO!n", &at, &make, &PyList_Type, &places, &number)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "an owned register is a tuple");
        return -1;
    }
    if (at < 0 || at >= PyList_GET_SIZE(self->registers) || number < 0 || number >= PyList_GET_SIZE(places)) {
        PyErr_SetString(PyExc_IndexError, "no such register or place");
        return -1;
    }
    self->owned[self->owners++] = (Owned){at, Py_NewRef(make), Py_NewRef(places), number};
    return 0;
}

/* ``(local, places, number)``: 0, or -1 with an exception set. */
static int read_given(Tape *self, PyObject *given)
{
    Py_ssize_t local, number;
    PyObject *places;
    if (!PyTuple_Check(given) || !PyArg_ParseTuple(given, "nO!n", &local, &PyList_Type, &places, &number)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a local that is given is a tuple");
        return -1;
    }
    if (local < 0 || local >= self->locals || number < 0 || number >= PyList_GET_SIZE(places)) {
        PyErr_SetString(PyExc_IndexError, "no such local or place");
        return -1;
    }
    self->given[self->givers++] = (Given){local, Py_NewRef(places), number};
    return 0;
}

static PyObject *tape_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"registers", "steps", "grad", "owned", "given", "acts", "back", "undo", NULL};
    PyObject *registers, *steps, *grad = Py_None, *owned = NULL, *given = NULL;
    Py_ssize_t acts = 0, back = 0, undo = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!O!|OO!O!nnn", names, &PyList_Type, &registers, &PyTuple_Type, &steps, &grad, &PyTuple_Type,
            &owned, &PyTuple_Type, &given, &acts, &back, &undo))
        return NULL;
    if (acts < 0 || back < 0 || undo < 0 || back + undo > PyTuple_GET_SIZE(steps)) {
        PyErr_SetString(PyExc_ValueError, "no such step");
        return NULL;
    }
    Tape *self = (Tape *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = tape_call;
    self->acts = acts;
    self->back = back;
    self->undo = undo;
    self->stopped = -1;
    self->registers = Py_NewRef(registers);
    self->grad = Py_NewRef(grad);
    self->steps = PyMem_Calloc(PyTuple_GET_SIZE(steps) + 1, sizeof(Step));
    self->owned = PyMem_Calloc((owned == NULL ? 0 : PyTuple_GET_SIZE(owned)) + 1, sizeof(Owned));
    self->given = PyMem_Calloc((given == NULL ? 0 : PyTuple_GET_SIZE(given)) + 1, sizeof(Given));
    if (self->steps == NULL || self->owned == NULL || self->given == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; owned != NULL && i < PyTuple_GET_SIZE(owned); i++)
        if (read_owned(self, PyTuple_GET_ITEM(owned, i)) < 0) {
            Py_DECREF(self);
            return NULL;
        }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps); i++) {
        self->count = i + 1;
        if (read_step(&self->steps[i], PyTuple_GET_ITEM(steps, i), self) < 0) {
            Py_DECREF(self);
            return NULL;
        }
    }
    for (Py_ssize_t i = 0; given != NULL && i < PyTuple_GET_SIZE(given); i++)
        if (read_given(self, PyTuple_GET_ITEM(given, i)) < 0) {
            Py_DECREF(self);
            return NULL;
        }
    return (PyObject *)self;
}

static PyMemberDef members[] = {
    {"stopped", T_PYSSIZET, offsetof(Tape, stopped), 0, "The step that raised in the last replay, or -1."},
    {"parted", T_INT, offsetof(Tape, parted), 0, "A step gave another result, and nobody took over from there since."},
    {"left", T_OBJECT, offsetof(Tape, left), 0, "What that replay left beside its registers, or None."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef methods[] = {
    {"put_back", put_back, METH_NOARGS, "Undo the last replay if it parted, and nobody took over from there since."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject TapeType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.Tape",
    .tp_doc = "Runs the steps of a recording one after the other on its registers and the leaves of a call.",
    .tp_basicsize = sizeof(Tape),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Tape, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = tape_new,
    .tp_dealloc = tape_dealloc,
    .tp_traverse = tape_traverse,
    .tp_clear = tape_clear,
    .tp_members = members,
    .tp_methods = methods,
};

int add_tape(PyObject *module)
{
    NAMES(INTERN)
    Parted = PyErr_NewExceptionWithDoc(
        "capture.native._native.Parted",
        "A step gave another result than was expected: the number that was told with it, and the result.", NULL, NULL);
    if (Parted == NULL || PyModule_AddObjectRef(module, "Parted", Parted) < 0 || PyType_Ready(&TapeType) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "Tape", (PyObject *)&TapeType);
}
