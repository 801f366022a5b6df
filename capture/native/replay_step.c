/* What a call does once its arguments fit: from the tree on to the result. */
#include "native.h"

#define NAMES(X) X(begin_call) X(find) X(ranges) X(is_clear) X(replay) X(build_single)
NAMES(DECLARE)

/* The view of a node: borrowed, or NULL with an exception. */
static NodeView *view_of(PyObject *node)
{
    const NodeParts *parts = parts_of(node);
    PyObject *view = parts == NULL ? NULL : parts->view == NULL ? unset() : parts->view;
    return view != NULL && is_of(view, &NodeViewType) ? (NodeView *)view : NULL;
}

/* Some output of the node is still used. */
static int has_used_outputs(PyObject *node)
{
    NodeView *view = view_of(node);
    if (view == NULL)
        return -1;
    Py_INCREF(view);
    int used = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(view->live) && !used; i++) {
        PyObject *watch = Py_NewRef(PyList_GET_ITEM(view->live, i));
        used = is_used(watch);
        Py_DECREF(watch);
    }
    Py_DECREF(view);
    return used;
}

/* All that was dead when it was recorded is dead now: 1, 0, -1. */
static int may_run(NodeView *view)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(view->before); i++) {
        PyObject *pair = PyTuple_GET_ITEM(view->before, i), *live = PyTuple_GET_ITEM(pair, 0);
        Py_ssize_t number = PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 1));
        if (number < 0 || number >= PyList_GET_SIZE(live))
            return PyErr_Occurred() ? -1 : 0;
        PyObject *watch = Py_NewRef(PyList_GET_ITEM(live, number));
        int used = is_used(watch);
        Py_DECREF(watch);
        if (used)
            return used < 0 ? -1 : 0;
    }
    return 1;
}

/* The lists and the dict of a tree: never other ones, so that they are borrowed as long as the tree is there. */
typedef struct {
    PyObject *path, *warm, *buried, *lingering, *times;
} Lists;

static int lists_of(PyObject *tree, Lists *lists)
{
    if (!is_of(tree, slots.Tree.type))
        return -1;
#define TAKE(name) \
    if ((lists->name = SLOT(tree, Tree, name)) == NULL) \
        return -1;
    TAKE(path) TAKE(warm) TAKE(buried) TAKE(lingering) TAKE(times)
    return 0;
}

#define FEW 16 /* arguments */

/* An argument lies where the one output of the path's last node does: that is used, and nobody has to be asked. 1, 0. */
static int takes_last(PyObject *path, const uint64_t *addresses, Py_ssize_t count)
{
    PyObject *last = PyList_GET_ITEM(path, PyList_GET_SIZE(path) - 1);
    if (count == 0 || count > FEW || Py_TYPE(last) != slots.Node.type)
        return 0;
    NodeView *view = view_of(last);
    uint64_t place = view != NULL && PyList_GET_SIZE(view->live) == 1 ? place_handed_out(PyList_GET_ITEM(view->live, 0)) : 0;
    put_off_error();
    Py_ssize_t i = 0;
    while (i < count && addresses[i] != place)
        i++;
    return place != 0 && i < count;
}

/* Some output of a node on the path is still used: 1, 0, -1. Those of the last nodes are looked at first. */
static int is_path_used(PyObject *path)
{
    int used = 0;
    for (Py_ssize_t i = PyList_GET_SIZE(path) - 1; i >= 0 && !used; i--) {
        if (i >= PyList_GET_SIZE(path)) /* looking at outputs runs Python */
            continue;
        PyObject *node = Py_NewRef(PyList_GET_ITEM(path, i));
        used = has_used_outputs(node);
        Py_DECREF(node);
    }
    return used;
}

/* The path ends: 0, -1. */
static int end_step(PyObject *tree, const Lists *at)
{
    PyObject *root = SLOT(tree, Tree, root);
    if (root == NULL)
        return -1;
    PUT(tree, Tree, current, root);
    PyDict_Clear(at->times);
    if (PyList_SetSlice(at->warm, 0, PyList_GET_SIZE(at->warm), NULL) < 0)
        return -1;
    return PyList_SetSlice(at->path, 0, PyList_GET_SIZE(at->path), NULL);
}

/* It is the backward pass of another function: 1, 0; -1 for what is no captured function, without an exception. */
static int is_backward(PyObject *function)
{
    PyObject *said = Py_TYPE(function) == slots.Captured.type ? SLOT(function, Captured, is_backward) : NULL;
    return said == NULL ? -1 : said == Py_True;
}

/* What a tree counts its runs by, as it keeps no function: borrowed. */
static PyObject *number_of_function(PyObject *function)
{
    PyObject *number = Py_TYPE(function) == slots.Captured.type ? SLOT(function, Captured, number) : function;
    if (number == NULL)
        PyErr_Clear();
    return number == NULL ? function : number;
}

/* The step, whose first node this is, goes on with a function that is not in it: it does not begin with a backward pass
   that another function's forward pass follows. 1, 0, -1. */
static int takes_another(PyObject *first, PyObject *function)
{
    const NodeParts *parts = parts_of(first);
    if (parts == NULL || parts->function == NULL)
        return parts == NULL ? -1 : 0;
    int backward = is_backward(parts->function);
    return backward == 0 || (backward > 0 && is_backward(function) > 0);
}

/* Outputs are still used, but the step goes on as it is, as no mark came since: 1, 0, -1. Where a thread never marks
   steps, one goes on until a function comes again. */
static int goes_on(PyObject *tree, const Lists *at, PyObject *marks, PyObject *function, PyObject *limit)
{
    PyObject *begun = SLOT(marks, Marks, begun), *mark = SLOT(tree, Tree, mark);
    if (begun == NULL || mark == NULL)
        return -1;
    int same = begun == mark ? 1 : PyObject_RichCompareBool(begun, mark, Py_EQ);
    if (same <= 0)
        return same;
    PyObject *times = PyDict_GetItemWithError(at->times, number_of_function(function));
    int marked = PyErr_Occurred() ? -1 : PyObject_IsTrue(begun);
    if (marked < 0)
        return -1;
    if (!marked) /* looking at outputs runs Python, which may have ended the path */
        return times == NULL && PyList_GET_SIZE(at->path) ? takes_another(PyList_GET_ITEM(at->path, 0), function) : 0;
    return times == NULL ? 1 : PyObject_RichCompareBool(times, limit, Py_LE);
}

/* The step is over because nothing of it is used, or goes on as it is: 1, and all is done; 0: with nothing done; -1. */
static int begins_simply(
    PyObject *tree, const Lists *at, PyObject *marks, PyObject *function, PyObject *limit, const uint64_t *addresses,
    Py_ssize_t count)
{
    if (PyList_GET_SIZE(at->warm) || PyList_GET_SIZE(at->buried) || PyList_GET_SIZE(at->lingering))
        return 0;
    if (PyList_GET_SIZE(at->path) == 0)
        return 1;
    int used = takes_last(at->path, addresses, count) ? 1 : is_path_used(at->path);
    if (used)
        return used < 0 ? -1 : goes_on(tree, at, marks, function, limit);
    return end_step(tree, at) < 0 ? -1 : 1;
}

/* End the step if it is over. 1: the way goes on; 0: it does not fit. */
static int begins(const Steps *self, PyObject *tree, const Lists *at, const uint64_t *addresses)
{
    int simply = begins_simply(tree, at, self->marks, self->function, self->limit, addresses, self->tensors);
    if (simply)
        return simply;
    PyObject *args[] = {tree, self->function, self->limit, self->number};
    PyObject *done = PyObject_VectorcallMethod(s_begin_call, args, 4, NULL);
    if (done == NULL)
        return -1;
    Py_DECREF(done);
    return PyList_GET_SIZE(at->warm) == 0;
}

/* The address lies in the pool: 1, 0, -1. ``ranges``: where that is, if the pool knows it without a look. */
static int lies_in_pool(PyObject *pool, PyObject *ranges, uint64_t address)
{
    if (is_address_ranges(ranges))
        return lies_in_ranges(ranges, address);
    PyObject *number = PyLong_FromUnsignedLongLong(address);
    int inside = number == NULL ? -1 : truth_of(PyObject_CallMethodOneArg(pool, s_find, number));
    Py_XDECREF(number);
    return inside;
}

/* The arguments lie where they did on the recorded path: 1, 0, -1. */
static int stands(NodeView *node, PyObject *tree, const uint64_t *addresses, Py_ssize_t count)
{
    PyObject *pool = NULL, *ranges = NULL;
    int result = node->num_places == count;
    for (Py_ssize_t i = 0; result > 0 && i < count; i++) {
        if (node->places[i] != 0) {
            result = node->places[i] == addresses[i];
            continue;
        }
        if (pool == NULL) {
            pool = Py_XNewRef(SLOT(tree, Tree, pool));
            ranges = pool == NULL ? NULL : PyObject_GetAttr(pool, s_ranges);
        }
        int inside = ranges == NULL ? -1 : lies_in_pool(pool, ranges, addresses[i]);
        result = inside < 0 ? -1 : !inside;
    }
    Py_XDECREF(ranges);
    Py_XDECREF(pool);
    return result;
}

/* No memory that stays because somebody uses it is in its way: 1, 0, -1. What is not known is looked up in Python. */
static int is_clear(PyObject *node, PyObject *tree)
{
    const PyObject *known = SLOT(node, Node, clear_of), *pins = known == NULL ? NULL : SLOT(tree, Tree, pins);
    if (pins == NULL || known == pins)
        return pins == NULL ? -1 : 1;
    return truth_of(PyObject_CallMethodOneArg(tree, s_is_clear, node));
}

/* The node that the current one is to be followed by: a new reference; NULL without an exception if none fits. */
static PyObject *fitting(
    const Steps *self, PyObject *tree, const Lists *at, const uint64_t *addresses, NodeView **view)
{
    PyObject *current = SLOT(tree, Tree, current);
    PyObject *followers = current != NULL && is_of(current, slots.Node.type) ? SLOT(current, Node, latest_children) : NULL;
    PyObject *node = followers == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(followers, self->number));
    int fits = node == NULL || !is_of(node, slots.Node.type) ? 0 : is_clear(node, tree);
    if (fits <= 0 || (*view = view_of(node)) == NULL) {
        Py_XDECREF(node);
        return NULL;
    }
    Py_INCREF(*view);
    fits = PyList_GET_SIZE(at->path) ? stands(*view, tree, addresses, self->tensors) : 1;
    if (fits > 0)
        fits = may_run(*view);
    if (fits > 0 && self->verifies)
        fits = truth_of(Py_XNewRef(SLOT(node, Node, verified)));
    if (fits <= 0)
        Py_CLEAR(node);
    return node;
}

/* One more in an attribute that counts: 0, -1. */
static int count_up(PyObject *object, Py_ssize_t at)
{
    PyObject *known = slot_at(object, at);
    PyObject *more = known == NULL ? NULL : PyLong_FromLongLong(PyLong_AsLongLong(known) + 1);
    if (more == NULL)
        return -1;
    put(object, at, more);
    Py_DECREF(more);
    return 0;
}

/* A replay of an entry, for whether values that the host reads in it come again: 0, -1. */
static int count_read(PyObject *entry, PyObject *node)
{
    PyObject *reads = SLOT(node, Node, reads), *counts = reads == NULL ? NULL : SLOT(entry, Entry, steadiness);
    if (counts == NULL || PyObject_Size(reads) == 0)
        return counts == NULL ? -1 : 0;
    return is_of(counts, slots.Steadiness.type) ? count_up(counts, slots.Steadiness.replays) : -1;
}

static long long clock_of_runs; /* under the lock of the interpreter, or a little wrong */

/* The node just ran: 0, -1. */
static int stand_on(PyObject *tree, const Lists *at, PyObject *node, PyObject *marks, PyObject *function)
{
    if (PyList_GET_SIZE(at->path) == 0 && PyList_GET_SIZE(at->warm) == 0) {
        PyObject *begun = SLOT(marks, Marks, begun);
        if (begun == NULL)
            return -1;
        PUT(tree, Tree, mark, begun);
    }
    NodeView *view = view_of(node);
    if (view == NULL || PyList_Append(at->path, node) < 0)
        return -1;
    view->used = ++clock_of_runs;
    view->runs++;
    PyObject *name = number_of_function(function), *known = PyDict_GetItemWithError(at->times, name);
    PyObject *more = PyErr_Occurred() ? NULL : PyLong_FromLong(known == NULL ? 1 : PyLong_AsLong(known) + 1);
    int failed = more == NULL || PyDict_SetItem(at->times, name, more) < 0;
    Py_XDECREF(more);
    if (failed)
        return -1;
    PUT(tree, Tree, current, node);
    PUT(tree, Tree, pool_is_at, Py_None);
    return 0;
}

/* ``replay(node, tree, values, leaves)`` or, without a node, ``ready(entry, values, leaves)``, in Python. */
static PyObject *in_python(const Steps *self, PyObject *node, PyObject *tree, PyObject *const *values, PyObject *leaves)
{
    PyObject *tuple = PyTuple_New(self->count), *result = NULL;
    for (Py_ssize_t i = 0; tuple != NULL && i < self->count; i++)
        PyTuple_SET_ITEM(tuple, i, Py_NewRef(values[i]));
    if (tuple != NULL && node != NULL) {
        PyObject *args[] = {node, tree, tuple, leaves};
        result = PyObject_Vectorcall(self->replay, args, 4, NULL);
    } else if (tuple != NULL) {
        PyObject *args[] = {self->entry, tuple, leaves};
        result = PyObject_Vectorcall(self->ready, args, 3, NULL);
    }
    Py_XDECREF(tuple);
    return result;
}

PyObject *steps_ready(const Steps *self, PyObject *const *values, PyObject *const *tensors)
{
    PyObject *leaves = list_of(tensors, self->tensors);
    PyObject *result = leaves == NULL ? NULL : in_python(self, NULL, NULL, values, leaves);
    Py_XDECREF(leaves);
    return result;
}

/* ``raised(node, tree, values, leaves, error)``, which gives the call's result or raises. */
static PyObject *after_error(
    const Steps *self, PyObject *node, PyObject *tree, PyObject *const *values, PyObject *leaves)
{
    PyObject *error = taken_error(), *tuple = PyTuple_New(self->count), *result = NULL;
    for (Py_ssize_t i = 0; tuple != NULL && i < self->count; i++)
        PyTuple_SET_ITEM(tuple, i, Py_NewRef(values[i]));
    if (tuple != NULL && error != NULL) {
        PyObject *args[] = {node, tree, tuple, leaves, error};
        result = PyObject_Vectorcall(self->raised, args, 5, NULL);
    }
    Py_XDECREF(tuple);
    Py_XDECREF(error);
    return result;
}

/* Its guards hold: 1; they do not: 0; -1. Sets ``*leaves`` where it made the list. */
static int state_holds(
    const Steps *self, PyObject *node, PyObject *const *tensors, const uint64_t *addresses, PyObject **leaves)
{
    const NodeParts *parts = parts_of(node);
    PyObject *check = parts == NULL ? NULL : parts->check == NULL ? unset() : parts->check;
    if (check == NULL || check == self->ok)
        return check == NULL ? -1 : 1;
    Py_INCREF(check);
    int verdict = -1;
    if (is_guards(check))
        verdict = guards_verdict(check, addresses, self->tensors);
    else if ((*leaves = list_of(tensors, self->tensors)) != NULL)
        verdict = (int)number_of(PyObject_CallOneArg(check, *leaves));
    Py_DECREF(check);
    return verdict < 0 && PyErr_Occurred() ? -1 : verdict == HOLDS;
}

/* What the replay left, as the call's result. May be asked for again where it raises. */
static PyObject *outputs_of(
    NodeView *view, PyObject *node, PyObject *tree, PyObject *const *tensors, Py_ssize_t count)
{
    if (view->source != Py_None) {
        PyObject *result = single_output(view);
        return result != NULL || PyErr_Occurred() ? result : PyObject_CallMethodNoArgs(view->outputs, s_build_single);
    }
    const NodeParts *parts = parts_of(node);
    PyObject *statics = parts == NULL ? NULL : Py_XNewRef(parts->statics == NULL ? unset() : parts->statics);
    PyObject *pool = statics == NULL ? NULL : Py_XNewRef(SLOT(tree, Tree, pool));
    PyObject *result = pool == NULL ? NULL : several_outputs(view, pool, statics, tensors, count);
    Py_XDECREF(pool);
    Py_XDECREF(statics);
    return result;
}

/* The replay, and all that has to follow on it. ``leaves`` are not needed for a launch. ``put_off``: what came while a
   replay that raised was ended, a list or NULL. */
static PyObject *committed_replay(
    const Steps *self, PyObject *replay, PyObject *leaves, PyObject *node, NodeView *view, PyObject *tree,
    const Lists *at, PyObject *const *tensors, const uint64_t *addresses, const Where *where, PyObject **put_off)
{
    PyObject *result = NULL;
    Commit commit;
    commit_begin(&commit);
    int ended;
    if (is_launch(replay))
        ended = launch_run(replay, tensors, addresses, self->tensors, where) == 0;
    else {
        PyObject *done = PyObject_CallOneArg(replay, leaves);
        ended = done != NULL;
        Py_XDECREF(done);
    }
    if (commit_ran(&commit, ended)) {
        do
            result = outputs_of(view, node, tree, tensors, self->tensors);
        while (result == NULL && commit_puts_off(&commit));
        if (result != NULL && (stand_on(tree, at, node, self->marks, self->function) < 0 ||
                               count_up(self->counters, slots.Counters.replays) < 0 ||
                               count_read(self->entry, node) < 0))
            Py_CLEAR(result);
    }
    commit_end(&commit);
    if (result != NULL && commit_told(&commit, self->tell) < 0)
        Py_CLEAR(result);
    if (!commit.ran)
        *put_off = Py_XNewRef(commit.errors);
    Py_XDECREF(commit.errors);
    return result;
}

/* Once the error of a replay was dealt with, an interrupt that came meanwhile comes out in place of all else. */
static void tell_put_off(const Steps *self, PyObject *errors, PyObject **result)
{
    PyObject *error = *result == NULL ? taken_error() : NULL, *told = PyObject_CallOneArg(self->tell, errors);
    if (told == NULL)
        Py_CLEAR(*result);
    else if (error != NULL)
        raise_again(error);
    Py_XDECREF(told);
    Py_XDECREF(error);
}

/* ``recording.replay``: where objects of its class keep it, if they have a slot for it. */
static PyObject *replay_of(PyObject *recording)
{
    static PyTypeObject *type; /* the class of the last recording */
    static Py_ssize_t at;
    if (Py_TYPE(recording) != type) {
        at = slot_of((PyObject *)Py_TYPE(recording), s_replay);
        Py_XSETREF(type, (PyTypeObject *)Py_NewRef(Py_TYPE(recording)));
    }
    return at < 0 ? PyObject_GetAttr(recording, s_replay) : Py_XNewRef(slot_at(recording, at));
}

/* Runs the replay. From here on what happens is the call itself, and is not undone. */
static PyObject *run(
    const Steps *self, PyObject *node, NodeView *view, PyObject *tree, const Lists *at, PyObject *const *values,
    PyObject *const *tensors, const uint64_t *addresses, const Where *where)
{
    PyObject *leaves = NULL, *recording = NULL, *replay = NULL, *result = NULL, *put_off = NULL, *range;
    int holds = state_holds(self, node, tensors, addresses, &leaves);
    if (holds < 0) {
        result = left_to_python(self->miss);
        goto end;
    }
    if (!holds) {
        leaves = leaves == NULL ? list_of(tensors, self->tensors) : leaves;
        result = leaves == NULL ? NULL : in_python(self, NULL, NULL, values, leaves);
        goto end;
    }
    int to_python = PyList_GET_SIZE(at->lingering) || (view->source == Py_None && view->several == Py_None);
    if (to_python) {
        leaves = leaves == NULL ? list_of(tensors, self->tensors) : leaves;
        result = leaves == NULL ? NULL : in_python(self, node, tree, values, leaves);
        goto end;
    }
    const NodeParts *parts = parts_of(node);
    recording = parts == NULL ? NULL : Py_XNewRef(parts->recording == NULL ? unset() : parts->recording);
    replay = recording == NULL ? NULL : replay_of(recording);
    if (replay == NULL)
        goto end;
    if (!is_launch(replay) && leaves == NULL && (leaves = list_of(tensors, self->tensors)) == NULL)
        goto end;
    if (range_begin(self->function, &range) < 0)
        goto end;
    result = committed_replay(self, replay, leaves, node, view, tree, at, tensors, addresses, where, &put_off);
    if (range != NULL)
        range_end(range, &result);
    if (result == NULL && !is_launch(replay)) {
        result = after_error(self, node, tree, values, leaves);
        if (result == NULL)
            tape_put_back(replay);
        if (put_off != NULL)
            tell_put_off(self, put_off, &result);
    } else if (result != NULL && self->attach != Py_None) {
        leaves = leaves == NULL ? list_of(tensors, self->tensors) : leaves;
        PyObject *args[] = {result, leaves, node};
        PyObject *attached = leaves == NULL ? NULL : PyObject_Vectorcall(self->attach, args, 3, NULL);
        Py_SETREF(result, attached);
    }
end:
    Py_XDECREF(leaves);
    Py_XDECREF(recording);
    Py_XDECREF(replay);
    Py_XDECREF(put_off);
    return result;
}

static _Thread_local int on_the_way; /* calls of this thread that are here, from the tree on to their results */

PyObject *steps_take(
    const Steps *self, PyObject *tree, PyObject *const *values, PyObject *const *tensors, const uint64_t *addresses,
    const Where *where)
{
    PyObject *result = NULL, *node = NULL;
    NodeView *view = NULL;
    Lists at;
    if (lists_of(tree, &at) < 0)
        return left_to_python(self->miss);
    on_the_way++;
    int begun = begins(self, tree, &at, addresses);
    node = begun <= 0 ? NULL : fitting(self, tree, &at, addresses, &view);
    if (node != NULL)
        result = run(self, node, view, tree, &at, values, tensors, addresses, where);
    else
        result = PyErr_Occurred() ? left_to_python(self->miss) : Py_NewRef(self->miss);
    on_the_way--;
    Py_XDECREF(node);
    Py_XDECREF(view);
    return result;
}

/* Nothing that such a call may use is given up meanwhile: the collector may ask for it between any two steps. */
static PyObject *py_is_on_the_way(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    (void)module;
    return PyBool_FromLong(on_the_way);
}

int are_seen(const Steps *self)
{
    return is_of(self->entry, slots.Entry.type) && is_of(self->counters, slots.Counters.type) &&
           is_of(self->marks, slots.Marks.type);
}

/* ``may_run`` for the general way in Python, which uses the same lists. */
static PyObject *py_may_run(PyObject *module, PyObject *node)
{
    (void)module;
    NodeView *view = view_of(node);
    if (view == NULL)
        return NULL;
    Py_INCREF(view);
    int may = may_run(view);
    Py_DECREF(view);
    return may < 0 ? NULL : PyBool_FromLong(may);
}

static PyObject *py_is_path_used(PyObject *module, PyObject *path)
{
    (void)module;
    if (!PyList_Check(path)) {
        PyErr_SetString(PyExc_TypeError, "a path is a list");
        return NULL;
    }
    int used = is_path_used(path);
    return used < 0 ? NULL : PyBool_FromLong(used);
}

static PyObject *py_begins_simply(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *tree, *marks, *function, *limit;
    Lists at;
    if (!PyArg_ParseTuple(args, "OOOO", &tree, &marks, &function, &limit) || !is_of(marks, slots.Marks.type) ||
        lists_of(tree, &at) < 0)
        return NULL;
    int simply = begins_simply(tree, &at, marks, function, limit, NULL, 0);
    return simply < 0 ? NULL : PyBool_FromLong(simply);
}

static PyObject *py_end_step(PyObject *module, PyObject *tree)
{
    (void)module;
    Lists at;
    if (lists_of(tree, &at) < 0 || end_step(tree, &at) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_stand_on(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *tree, *node, *marks, *function;
    Lists at;
    if (!PyArg_ParseTuple(args, "OOOO", &tree, &node, &marks, &function) || !is_of(marks, slots.Marks.type) ||
        lists_of(tree, &at) < 0 || stand_on(tree, &at, node, marks, function) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_runs(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    (void)module;
    return PyLong_FromLongLong(clock_of_runs);
}

static PyMethodDef methods[] = {
    {"is_on_the_way", py_is_on_the_way, METH_NOARGS, "A call of this thread is on the fast way."},
    {"runs", py_runs, METH_NOARGS, "How many recordings ran in this process."},
    {"may_run", py_may_run, METH_O, "All that was dead when the node was recorded is dead now."},
    {"is_path_used", py_is_path_used, METH_O, "Some output of a node on the path is still used."},
    {"begins_simply", py_begins_simply, METH_VARARGS, "A step that is over was ended, or goes on as it is; else False."},
    {"end_step", py_end_step, METH_O, "The path of the tree ends."},
    {"stand_on", py_stand_on, METH_VARARGS, "The node just ran."},
    {NULL, NULL, 0, NULL},
};

int add_steps(PyObject *module)
{
    NAMES(INTERN)
    return PyModule_AddFunctions(module, methods);
}
