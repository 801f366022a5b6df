/* Which Python code ran in this thread between two moments, and with which globals; which functions in C it called.

   A profile function of the thread, put beside one that is there already: it gets every event, too. Code is sorted by
   the name of its module, once by a function in Python: noted, or not, and whether what it calls is ours. Not by the code
   object: code of two modules that was generated from the same text is equal. Nothing but the thread is changed.

   What a garbage collection runs is left out, as it may come at any time and is about objects of anybody: finalizers,
   and callbacks of weak references. */
#include "native.h"

#include <structmember.h>

enum { NOTED, AS_ITS_CALLER, OURS, BETWEEN, ASIDE, OPERATORS }; /* as in ``state/code_run.py`` */

#define APART 2 /* nothing below is noted, whatever it calls */
#define LEVELS 3
#define OWN 4 /* the frame itself is noted, not only what it calls */
#define BELOW 8 /* the frame runs inside an operator, which was seen itself */

/* A function in C, with the class of what it is bound to. Kept by address for the length of one watch. */
typedef struct {
    PyMethodDef *function;
    PyTypeObject *of;
} Called;

typedef struct {
    PyObject_HEAD
    PyObject *sort;  /* a function: the name of a module, or None, to one of the kinds */
    PyObject *kinds; /* a dict: what it said of each name */
    PyObject *apart; /* a tuple of code objects that count for nothing, as whoever calls them comes at any time */
    PyObject *name;  /* "__name__" */
    PyObject *seen;  /* a dict: noted code to its globals */
    PyObject *below; /* a set: noted code that only operators ran */
    PyObject *asked; /* a set of code, whose frames */
    PyObject *on_frame; /* called with them as they begin */
    PyObject *more;  /* a list: pairs of code that ran with other globals, too */
    PyObject *leaves; /* a function: whether a function in C leaves something that a replay would not, or None */
    PyObject *calls; /* a list: those that do, with the code and the line that called them first */
    PyObject *builtins; /* "__builtins__" */
    PyObject *lent;     /* a list: globals in which there are builtins as long as this is on */
    Called *called;  /* a hash table of those that were looked at */
    size_t num_called, called_room;
    char *depths;    /* of each frame, whether what it calls is noted: 0, 1, or APART; and OWN */
    Py_ssize_t depth, room;
    int failed; /* something went wrong, so that not everything was noted */
    Py_tracefunc other;
    PyObject *other_object;
    int is_on;
    int within; /* it began in a collection, of which no other one comes */
} CodeWatch;

static PyTypeObject CodeWatchType;

static _Thread_local int collects; /* a collection that this thread began is not over */

/* One of ``gc.callbacks``. */
static PyObject *note_collection(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t num)
{
    if (num < 1 || !PyUnicode_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "a phase is expected");
        return NULL;
    }
    collects = PyUnicode_CompareWithASCIIString(args[0], "start") == 0;
    Py_RETURN_NONE;
}

/* How a code object is sorted: one of the kinds above, or -1 with an exception set. */
static int kind_of(CodeWatch *self, PyObject *code, PyObject *globals)
{
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(self->apart); at++)
        if (PyTuple_GET_ITEM(self->apart, at) == code)
            return ASIDE;
    PyObject *name = PyDict_GetItemWithError(globals, self->name);
    if (name == NULL && PyErr_Occurred())
        return -1;
    if (name == NULL || !PyUnicode_CheckExact(name))
        name = Py_None;
    PyObject *known = PyDict_GetItemWithError(self->kinds, name);
    if (known != NULL || PyErr_Occurred())
        return known == NULL ? -1 : (int)PyLong_AsLong(known);
    PyObject *kind = PyObject_CallOneArg(self->sort, name);
    if (kind == NULL || PyDict_SetItem(self->kinds, name, kind) < 0) {
        Py_XDECREF(kind);
        return -1;
    }
    int found = (int)PyLong_AsLong(kind);
    Py_DECREF(kind);
    return found;
}

/* What torch imports for a mode, it imports by the globals of the frame that runs: ones that were made by hand have no
   builtins, although the frame does. 0, -1. */
static int lend_builtins(CodeWatch *self, PyFrameObject *frame, PyObject *globals)
{
    int has = PyDict_Contains(globals, self->builtins);
    if (has)
        return has < 0 ? -1 : 0;
    PyObject *builtins = PyFrame_GetBuiltins(frame);
    int failed = builtins == NULL || PyList_Append(self->lent, globals) < 0;
    failed = failed || PyDict_SetItem(globals, self->builtins, builtins) < 0;
    Py_XDECREF(builtins);
    return failed ? -1 : 0;
}

/* Takes them back. */
static void take_builtins_back(CodeWatch *self)
{
    for (Py_ssize_t at = PyList_GET_SIZE(self->lent); at-- > 0;)
        if (PyDict_DelItem(PyList_GET_ITEM(self->lent, at), self->builtins) < 0)
            PyErr_Clear(); /* the body did so */
    if (PyList_SetSlice(self->lent, 0, PyList_GET_SIZE(self->lent), NULL) < 0)
        PyErr_Clear();
}

/* Notes a code object with its globals: 0, -1. */
static int add_code(CodeWatch *self, PyObject *code, PyObject *globals)
{
    PyObject *known = PyDict_GetItemWithError(self->seen, code);
    if (known == globals)
        return 0;
    if (known == NULL)
        return PyErr_Occurred() ? -1 : PyDict_SetItem(self->seen, code, globals);
    PyObject *pair = PyTuple_Pack(2, code, globals);
    int failed = pair == NULL || PyList_Append(self->more, pair) < 0;
    Py_XDECREF(pair);
    return failed ? -1 : 0;
}

/* The place of a function in C in the table, which has room for it; NULL without memory. */
static Called *called_at(CodeWatch *self, PyMethodDef *function, PyTypeObject *of)
{
    if (self->num_called * 2 >= self->called_room) {
        size_t room = self->called_room * 2 + 256, old = self->called_room;
        Called *before = self->called, *grown = PyMem_Calloc(room, sizeof(Called));
        if (grown == NULL)
            return NULL;
        self->called = grown;
        self->called_room = room;
        self->num_called = 0;
        for (size_t i = 0; i < old; i++)
            if (before[i].function != NULL) {
                *called_at(self, before[i].function, before[i].of) = before[i];
                self->num_called++;
            }
        PyMem_Free(before);
    }
    size_t at = (((size_t)function >> 4) * 31 + ((size_t)of >> 4)) % self->called_room;
    while (self->called[at].function != NULL && (self->called[at].function != function || self->called[at].of != of))
        at = at + 1 == self->called_room ? 0 : at + 1;
    return &self->called[at];
}

/* A function in C is called: 0, -1. */
static int note_call(CodeWatch *self, PyFrameObject *frame, PyObject *function)
{
    if (!PyCFunction_Check(function) || !self->depth || !(self->depths[self->depth - 1] & OWN))
        return 0;
    PyObject *bound = PyCFunction_GET_SELF(function);
    PyTypeObject *of = bound == NULL ? NULL : Py_TYPE(bound);
    Called *known = called_at(self, ((PyCFunctionObject *)function)->m_ml, of);
    if (known == NULL)
        return -1;
    if (known->function != NULL)
        return 0;
    known->function = ((PyCFunctionObject *)function)->m_ml;
    known->of = of;
    self->num_called++;
    PyObject *leaves = PyObject_CallOneArg(self->leaves, function);
    if (leaves == NULL || leaves == Py_None) {
        Py_XDECREF(leaves);
        return leaves == NULL ? -1 : 0;
    }
    PyObject *code = (PyObject *)PyFrame_GetCode(frame);
    PyObject *call = Py_BuildValue("(NNi)", leaves, code, PyFrame_GetLineNumber(frame));
    int failed = call == NULL || PyList_Append(self->calls, call) < 0;
    Py_XDECREF(call);
    return failed ? -1 : 0;
}

/* Tells of the frame if it runs code that was asked for: 0, -1. */
static int tell_frame(CodeWatch *self, PyObject *code, PyFrameObject *frame)
{
    int is_asked = PySet_GET_SIZE(self->asked) ? PySet_Contains(self->asked, code) : 0;
    if (is_asked <= 0)
        return is_asked;
    PyObject *answer = PyObject_CallOneArg(self->on_frame, (PyObject *)frame);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* A frame begins: 0, -1. */
static int enter(CodeWatch *self, PyFrameObject *frame)
{
    if (self->depth == self->room) {
        char *grown = PyMem_Realloc(self->depths, (size_t)self->room * 2 + 64);
        if (grown == NULL)
            return -1;
        self->depths = grown;
        self->room = self->room * 2 + 64;
    }
    int above = self->depth == 0 ? 1 : self->depths[self->depth - 1];
    if (collects && !self->within)
        above = APART;
    int notes = above & LEVELS, below = above & BELOW, own = 0;
    PyObject *code = (PyObject *)PyFrame_GetCode(frame);
    PyObject *globals = PyFrame_GetGlobals(frame);
    int kind = notes == APART ? BETWEEN : globals == NULL ? -1 : kind_of(self, code, globals), failed = kind < 0;
    if (kind == NOTED || (kind == AS_ITS_CALLER && notes)) {
        if (!below)
            failed = PySet_Discard(self->below, code) < 0;
        else if (!PyDict_Contains(self->seen, code))
            failed = PySet_Add(self->below, code) < 0;
        failed = failed || lend_builtins(self, frame, globals) < 0 || add_code(self, code, globals) < 0;
        failed = failed || tell_frame(self, code, frame) < 0;
        notes = 1;
        own = OWN;
    } else if (kind == OURS || kind == OPERATORS || kind == ASIDE) {
        notes = kind == ASIDE ? APART : 0;
        below = kind == OPERATORS ? BELOW : below;
    } else if (kind == BETWEEN && notes != APART)
        failed = tell_frame(self, code, frame) < 0;
    Py_DECREF(code);
    Py_XDECREF(globals);
    self->depths[self->depth++] = (char)(notes | own | below);
    return failed ? -1 : 0;
}

static int profile(PyObject *object, PyFrameObject *frame, int what, PyObject *arg)
{
    CodeWatch *self = (CodeWatch *)object;
    int failed = what == PyTrace_CALL ? enter(self, frame) : what == PyTrace_C_CALL ? note_call(self, frame, arg) : 0;
    if (failed < 0) {
        put_off_error(); /* the program goes on; the run is not trusted */
        self->failed = 1;
    } else if (what == PyTrace_RETURN && self->depth)
        self->depth--;
    return self->other == NULL ? 0 : self->other(self->other_object, frame, what, arg);
}

static PyObject *begin(PyObject *object, PyObject *Py_UNUSED(none))
{
    CodeWatch *self = (CodeWatch *)object;
    PyThreadState *thread = PyThreadState_Get();
    if (self->is_on) {
        PyErr_SetString(PyExc_RuntimeError, "it is on");
        return NULL;
    }
    self->other = thread->c_profilefunc;
    Py_XSETREF(self->other_object, Py_XNewRef(thread->c_profileobj));
    self->depth = 0;
    self->is_on = 1;
    self->within = collects;
    PyEval_SetProfile(profile, object);
    Py_RETURN_NONE;
}

static PyObject *end(PyObject *object, PyObject *Py_UNUSED(none))
{
    CodeWatch *self = (CodeWatch *)object;
    PyThreadState *thread = PyThreadState_Get();
    if (self->is_on && thread->c_profilefunc == profile && thread->c_profileobj == object)
        PyEval_SetProfile(self->other, self->other_object);
    else
        self->failed = 1; /* the body put another one in its place, which stays there */
    self->is_on = 0;
    take_builtins_back(self);
    self->other = NULL;
    Py_CLEAR(self->other_object);
    return PyBool_FromLong(!self->failed);
}

static PyObject *code_watch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sort", "kinds", "apart", "leaves", "asked", "on_frame", NULL};
    PyObject *sort, *kinds, *apart, *leaves, *asked, *on_frame;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!OO!O", names, &sort, &PyDict_Type, &kinds, &PyTuple_Type,
                                     &apart, &leaves, &PySet_Type, &asked, &on_frame))
        return NULL;
    CodeWatch *self = (CodeWatch *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->sort = Py_NewRef(sort);
    self->kinds = Py_NewRef(kinds);
    self->apart = Py_NewRef(apart);
    self->name = PyUnicode_InternFromString("__name__");
    self->leaves = Py_NewRef(leaves);
    self->asked = Py_NewRef(asked);
    self->on_frame = Py_NewRef(on_frame);
    self->seen = PyDict_New();
    self->below = PySet_New(NULL);
    self->more = PyList_New(0);
    self->calls = PyList_New(0);
    self->builtins = PyUnicode_InternFromString("__builtins__");
    self->lent = PyList_New(0);
    int failed = self->builtins == NULL || self->lent == NULL || self->name == NULL || self->seen == NULL;
    if (failed || self->below == NULL || self->more == NULL || self->calls == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int code_watch_traverse(PyObject *object, visitproc visit, void *arg)
{
    CodeWatch *self = (CodeWatch *)object;
    Py_VISIT(self->sort);
    Py_VISIT(self->kinds);
    Py_VISIT(self->apart);
    Py_VISIT(self->seen);
    Py_VISIT(self->below);
    Py_VISIT(self->more);
    Py_VISIT(self->leaves);
    Py_VISIT(self->asked);
    Py_VISIT(self->on_frame);
    Py_VISIT(self->calls);
    Py_VISIT(self->lent);
    Py_VISIT(self->other_object);
    return 0;
}

static int code_watch_clear(PyObject *object)
{
    CodeWatch *self = (CodeWatch *)object;
    Py_CLEAR(self->sort);
    Py_CLEAR(self->kinds);
    Py_CLEAR(self->apart);
    Py_CLEAR(self->name);
    Py_CLEAR(self->seen);
    Py_CLEAR(self->below);
    Py_CLEAR(self->more);
    Py_CLEAR(self->leaves);
    Py_CLEAR(self->asked);
    Py_CLEAR(self->on_frame);
    Py_CLEAR(self->calls);
    Py_CLEAR(self->builtins);
    Py_CLEAR(self->lent);
    Py_CLEAR(self->other_object);
    return 0;
}

static void code_watch_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    code_watch_clear(object);
    PyMem_Free(((CodeWatch *)object)->depths);
    PyMem_Free(((CodeWatch *)object)->called);
    Py_TYPE(object)->tp_free(object);
}

static PyMethodDef methods[] = {
    {"begin", begin, METH_NOARGS, "Note the code that this thread runs from now on."},
    {"end", end, METH_NOARGS, "Note no more. False: what was noted is not all."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"seen", T_OBJECT, offsetof(CodeWatch, seen), READONLY, "Code to its globals."},
    {"below", T_OBJECT, offsetof(CodeWatch, below), READONLY, "Of that code, what only operators ran."},
    {"more", T_OBJECT, offsetof(CodeWatch, more), READONLY, "Code that ran with other globals, too, with those."},
    {"calls", T_OBJECT, offsetof(CodeWatch, calls), READONLY, "What functions in C left, by which code and line."},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject CodeWatchType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.CodeWatch",
    .tp_doc = "Notes the Python code that runs in a thread.",
    .tp_basicsize = sizeof(CodeWatch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_methods = methods,
    .tp_members = members,
    .tp_new = code_watch_new,
    .tp_dealloc = code_watch_dealloc,
    .tp_traverse = code_watch_traverse,
    .tp_clear = code_watch_clear,
};

int add_code_watch(PyObject *module)
{
    static PyMethodDef functions[] = {
        {"note_collection", (PyCFunction)(void (*)(void))note_collection, METH_FASTCALL,
         "Called as a garbage collection begins and ends: what runs in it is no part of a watched body."},
        {NULL, NULL, 0, NULL},
    };
    if (PyType_Ready(&CodeWatchType) < 0 || PyModule_AddFunctions(module, functions) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "CodeWatch", (PyObject *)&CodeWatchType);
}
