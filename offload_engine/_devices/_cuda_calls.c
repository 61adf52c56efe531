// SPDX-License-Identifier: Apache-2.0
/* The CUDA runtime's calls of the hot path, without the microsecond that ctypes takes for each.
 *
 * Neither CUDA's headers nor its libraries are needed to build this: Python passes the addresses of the functions, in
 * the runtime that torch has loaded. Arguments and results are integers, as with ctypes. What may block, where a queue
 * of the device is full, lets other threads run meanwhile.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_call_queue.h"

typedef int (*record_t)(void *event, void *stream);
typedef int (*wait_t)(void *stream, void *event, unsigned flags);
typedef int (*query_t)(void *event);
typedef int (*copy_t)(void *target, const void *source, size_t nbytes, int kind, void *stream);
typedef int (*last_error_t)(void);
typedef int (*get_device_t)(int *device);
typedef int (*set_device_t)(int device);
typedef int (*capture_mode_t)(int *mode);

/* cudaMemcpyAttributes of CUDA 13. */
typedef struct {
    int source_access_order;
    struct {
        int type, id;
    } source_hint, target_hint;
    unsigned flags;
} attributes_t;

#define STREAM_ORDER 1         /* cudaMemcpySrcAccessOrderStream */
#define OVERLAP_WITH_COMPUTE 1 /* cudaMemcpyFlagPreferOverlapWithCompute: by the copy engines, not the multiprocessors */

typedef int (*copy_batch_t)(void *const *targets, const void *const *sources, const size_t *sizes, size_t count,
                            attributes_t *attributes, size_t *first_of_attributes, size_t num_attributes,
                            void *stream);

typedef struct {
    PyObject_HEAD
    record_t record;
    wait_t wait;
    query_t query;
    copy_t copy;
    last_error_t last_error;
    get_device_t get_device;
    set_device_t set_device;
    capture_mode_t exchange_capture_mode;
    copy_batch_t copy_batch; /* NULL: the runtime has none, or one with other arguments */
    queue_t queue;           /* of routines: their calls in the background */
    int device_of_thread;    /* -1: none yet */
} Calls;

/* Returns when all calls in the background are made, so that those on the copy streams keep their order. Returns the
 * first error of theirs. */
static int settle(Calls *calls)
{
    queue_await(&calls->queue, NULL, NULL);
    return queue_take_code(&calls->queue);
}

#define COPIES_ON_STACK 64

/* Parses `count` non-negative integers; false, with an exception set, if there are more or fewer or others. */
static int parse(const char *name, PyObject *const *args, Py_ssize_t given, Py_ssize_t count, size_t *values)
{
    if (given != count) {
        PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments, got %zd", name, count, given);
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        values[i] = PyLong_AsSize_t(args[i]);
        if (values[i] == (size_t)-1 && PyErr_Occurred())
            return 0;
    }
    return 1;
}

static PyObject *calls_record(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    size_t values[2];
    int code;
    if (!parse("record", args, given, 2, values))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    code = settle((Calls *)self);
    if (code == 0)
        code = ((Calls *)self)->record((void *)values[0], (void *)values[1]);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(code);
}

static PyObject *calls_wait(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    size_t values[2];
    int code;
    if (!parse("wait", args, given, 2, values))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    code = settle((Calls *)self);
    if (code == 0)
        code = ((Calls *)self)->wait((void *)values[0], (void *)values[1], 0);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(code);
}

/* The event is free again at once: a wait is for what the event stood for when the wait was issued. */
static PyObject *calls_wait_stream(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    Calls *calls = (Calls *)self;
    size_t values[3];
    int code;
    if (!parse("wait_stream", args, given, 3, values))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    code = settle(calls);
    if (code == 0)
        code = calls->record((void *)values[1], (void *)values[2]);
    if (code == 0)
        code = calls->wait((void *)values[0], (void *)values[1], 0);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(code);
}

static PyObject *calls_query(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    size_t values[1];
    if (!parse("query", args, given, 1, values))
        return NULL;
    if (((Calls *)self)->queue.pid != 0) {
        Py_BEGIN_ALLOW_THREADS
        queue_await(&((Calls *)self)->queue, NULL, NULL);
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromLong(((Calls *)self)->query((void *)values[0]));
}

/* `head` is the stream, the event and the kind; `arrays` are `count` targets, as many sources, and as many sizes.
 * A capture records single copies only, so that one copy is a batch only where none is under way. */
static int issue_copies(const Calls *calls, const size_t *head, size_t *arrays, size_t count, size_t least_batch)
{
    attributes_t attributes = {.source_access_order = STREAM_ORDER, .flags = OVERLAP_WITH_COMPUTE};
    size_t first = 0, *targets = arrays, *sources = targets + count, *sizes = sources + count;
    void *stream = (void *)head[0], *event = (void *)head[1];
    int code = 0;
    /* One call takes the host less time than one for each copy. CUDA refuses it on the default stream. */
    if (count >= least_batch && stream != NULL && calls->copy_batch != NULL)
        code = calls->copy_batch((void *const *)targets, (const void *const *)sources, sizes, count, &attributes,
                                 &first, 1, stream);
    else
        for (size_t i = 0; i < count && code == 0; i++)
            code = calls->copy((void *)targets[i], (const void *)sources[i], sizes[i], (int)head[2], stream);
    return code == 0 ? calls->record(event, stream) : code;
}

/* Parses `count` times target, source and size into three arrays; false, with an exception set, if one is no size. */
static int parse_copies(PyObject *list, Py_ssize_t count, size_t *arrays)
{
    for (Py_ssize_t i = 0; i < 3 * count; i++) {
        size_t value = PyLong_AsSize_t(PyList_GET_ITEM(list, i));
        if (value == (size_t)-1 && PyErr_Occurred())
            return 0;
        arrays[i % 3 * count + i / 3] = value;
    }
    return 1;
}

static PyObject *calls_copy_all(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    size_t head[3], on_stack[3 * COPIES_ON_STACK], *arrays = on_stack;
    Py_ssize_t count = given == 4 && PyList_Check(args[3]) ? PyList_GET_SIZE(args[3]) / 3 : 0;
    PyObject *result = NULL;
    int code;
    if (count == 0 || PyList_GET_SIZE(args[3]) % 3 != 0) {
        PyErr_SetString(PyExc_TypeError, "copy_all() takes a stream, an event, a kind and a list: three numbers a copy");
        return NULL;
    }
    if (!parse("copy_all", args, 3, 3, head))
        return NULL;
    if (count > COPIES_ON_STACK && (arrays = PyMem_New(size_t, 3 * count)) == NULL)
        return PyErr_NoMemory();
    if (parse_copies(args[3], count, arrays)) {
        Py_BEGIN_ALLOW_THREADS
        code = settle((Calls *)self);
        if (code == 0)
            code = issue_copies((Calls *)self, head, arrays, (size_t)count, 2);
        Py_END_ALLOW_THREADS
        result = PyLong_FromLong(code);
    }
    if (arrays != on_stack)
        PyMem_Free(arrays);
    return result;
}

/* Calls in a row, each a code and its numbers: no object of Python is made or read between them. */
typedef struct {
    PyObject_VAR_HEAD
    Calls *calls;
    PyObject *otherwise; /* called with the routine and a code, where not all calls were made */
    int device;
    size_t num_own; /* numbers of the calls that are not made in the background */
    size_t numbers[];
} Routine;

#define ROUTINE_RECORD 0     /* stream, event */
#define ROUTINE_WAIT 1       /* stream, event */
#define ROUTINE_COPY 2       /* stream, event, kind, count; then targets, sources and sizes */
#define ROUTINE_BACKGROUND 3 /* what follows is left to the thread */
#define OTHER_DEVICE -1      /* none of CUDA's codes */
#define NO_THREAD 304        /* cudaErrorOperatingSystem */
#define ANY_CAPTURE 2        /* cudaStreamCaptureModeRelaxed */

/* Returns how many of `left` numbers the call at `at` has; 0 if it is none. */
static size_t length_of(const size_t *at, size_t left)
{
    if (left >= 3 && (at[0] == ROUTINE_RECORD || at[0] == ROUTINE_WAIT))
        return 3;
    if (left >= 5 && at[0] == ROUTINE_COPY && at[1] != 0 && at[4] > 0 && at[4] <= (left - 5) / 3)
        return 5 + 3 * at[4];
    return at[0] == ROUTINE_BACKGROUND;
}

/* Makes the call at `at`; `compute` takes the place of a stream that is 0. */
static int make_call(const Calls *calls, size_t *at, void *compute)
{
    void *stream = at[1] != 0 ? (void *)at[1] : compute;
    switch (at[0]) {
    case ROUTINE_RECORD:
        return calls->record((void *)at[2], stream);
    case ROUTINE_WAIT:
        return calls->wait(stream, (void *)at[2], 0);
    default:
        return issue_copies(calls, at + 1, at + 5, at[4], 1);
    }
}

/* Makes the calls between two places up to the first that fails. */
static int make_calls(const Calls *calls, size_t *at, size_t *end, void *compute)
{
    int code = 0;
    for (; at < end && code == 0; at += length_of(at, (size_t)(end - at)))
        code = make_call(calls, at, compute);
    return code;
}

/* The work of the thread. CUDA binds a thread to a device, and by default lets it disturb the captures of others. */
static int make_calls_in_background(void *entry)
{
    Routine *routine = entry;
    Calls *calls = routine->calls;
    int code = 0, mode = ANY_CAPTURE;
    if (calls->device_of_thread != routine->device) {
        code = calls->set_device(routine->device);
        if (code == 0)
            code = calls->exchange_capture_mode(&mode);
        if (code == 0)
            calls->device_of_thread = routine->device;
    }
    if (code != 0)
        return code;
    return make_calls(calls, routine->numbers + routine->num_own + 1, routine->numbers + Py_SIZE(routine), NULL);
}

static int is_routine(const void *entry, const void *key)
{
    return entry == key;
}

/* Whether a routine records an event in the background. */
static int is_recording(const void *entry, const void *event)
{
    const Routine *routine = entry;
    const size_t *at = routine->numbers + routine->num_own + 1, *end = routine->numbers + Py_SIZE(routine);
    for (; at < end; at += length_of(at, (size_t)(end - at)))
        if (at[0] != ROUTINE_WAIT && (const void *)at[2] == event)
            return 1;
    return 0;
}

/* Returns when a routine's own calls may be made: its last run is over, for it records the same events; those that
 * compute waits for are recorded; and before a call on another stream, all that came before on it. */
static void await_background(Routine *routine)
{
    queue_t *queue = &routine->calls->queue;
    size_t *at = routine->numbers, *end = at + routine->num_own;
    queue_await(queue, is_routine, routine);
    for (; at < end; at += length_of(at, (size_t)(end - at)))
        if (at[1] != 0)
            queue_await(queue, NULL, NULL);
        else if (at[0] == ROUTINE_WAIT)
            queue_await(queue, is_recording, (void *)at[2]);
}

/* Makes a routine's own calls, and leaves the others to the thread. Stream 0 is that of the current device, so no call
 * is made on another. */
static int run(Routine *routine, void *compute)
{
    Calls *calls = routine->calls;
    size_t *numbers = routine->numbers;
    int code, device;
    await_background(routine);
    code = queue_take_code(&calls->queue);
    if (code == 0 && compute == NULL) {
        code = calls->get_device(&device);
        if (code == 0 && device != routine->device)
            code = OTHER_DEVICE;
    }
    if (code == 0)
        code = make_calls(calls, numbers, numbers + routine->num_own, compute);
    if (code == 0 && routine->num_own < (size_t)Py_SIZE(routine) && !queue_give(&calls->queue, routine))
        code = NO_THREAD;
    return code;
}

static PyObject *routine_run(PyObject *self, PyObject *argument)
{
    Routine *routine = (Routine *)self;
    size_t compute = PyLong_AsSize_t(argument);
    int code;
    if (compute == (size_t)-1 && PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    code = run(routine, (void *)compute);
    Py_END_ALLOW_THREADS
    if (code != 0)
        return PyObject_CallFunction(routine->otherwise, "Oi", self, code);
    Py_RETURN_NONE;
}

static void routine_dealloc(PyObject *self)
{
    queue_t *queue = &((Routine *)self)->calls->queue;
    if (queue->pid == getpid()) { /* a forked child has no thread, and its lock may be held for ever */
        Py_BEGIN_ALLOW_THREADS
        queue_await(queue, is_routine, self);
        Py_END_ALLOW_THREADS
    }
    Py_DECREF(((Routine *)self)->calls);
    Py_XDECREF(((Routine *)self)->otherwise);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef routine_methods[] = {
    {"run", routine_run, METH_O, "Make the calls. Takes a stream."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject RoutineType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "offload_engine._devices._cuda_calls.Routine",
    .tp_doc = "Calls of the CUDA runtime in a row.",
    .tp_basicsize = sizeof(Routine),
    .tp_itemsize = sizeof(size_t),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = routine_dealloc,
    .tp_methods = routine_methods,
};

/* Fills a routine; false, with an exception set, if the list has other than calls. */
static int fill(Routine *routine, PyObject *list)
{
    size_t *at = routine->numbers, *end = at + Py_SIZE(routine), length;
    for (Py_ssize_t i = 0; i < Py_SIZE(routine); i++) {
        at[i] = PyLong_AsSize_t(PyList_GET_ITEM(list, i));
        if (at[i] == (size_t)-1 && PyErr_Occurred())
            return 0;
    }
    routine->num_own = (size_t)Py_SIZE(routine);
    for (; at < end; at += length) {
        int is_behind = at > routine->numbers + routine->num_own;
        length = length_of(at, (size_t)(end - at));
        if (length == 0 || (is_behind && (length == 1 || at[1] == 0))) {
            PyErr_SetString(PyExc_ValueError, "routine() takes the numbers of whole calls");
            return 0;
        }
        if (length == 1)
            routine->num_own = (size_t)(at - routine->numbers);
    }
    return 1;
}

static PyObject *calls_routine(PyObject *self, PyObject *args)
{
    PyObject *list, *otherwise;
    Routine *routine;
    int device;
    if (!PyArg_ParseTuple(args, "O!iO:routine", &PyList_Type, &list, &device, &otherwise))
        return NULL;
    if ((routine = PyObject_NewVar(Routine, &RoutineType, PyList_GET_SIZE(list))) == NULL)
        return NULL;
    routine->calls = (Calls *)Py_NewRef(self);
    routine->otherwise = Py_NewRef(otherwise);
    routine->device = device;
    if (!fill(routine, list))
        Py_CLEAR(routine);
    return (PyObject *)routine;
}

static PyObject *calls_settle(PyObject *self, PyObject *ignored)
{
    int code;
    Py_BEGIN_ALLOW_THREADS
    code = settle((Calls *)self);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(code);
}

static PyObject *calls_last_error(PyObject *self, PyObject *ignored)
{
    return PyLong_FromLong(((Calls *)self)->last_error());
}

static int calls_init(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"record",     "wait",       "query",       "copy", "last_error",
                            "get_device", "set_device", "exchange_capture_mode", "copy_batch", NULL};
    unsigned long long found[9];
    Calls *calls = (Calls *)self;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "KKKKKKKKK", names, &found[0], &found[1], &found[2], &found[3],
                                     &found[4], &found[5], &found[6], &found[7], &found[8]))
        return -1;
    for (int i = 0; i < 8; i++)
        if (found[i] == 0) {
            PyErr_SetString(PyExc_ValueError, "Calls() needs the addresses of its first eight functions, and 0 is none");
            return -1;
        }
    calls->record = (record_t)(uintptr_t)found[0];
    calls->wait = (wait_t)(uintptr_t)found[1];
    calls->query = (query_t)(uintptr_t)found[2];
    calls->copy = (copy_t)(uintptr_t)found[3];
    calls->last_error = (last_error_t)(uintptr_t)found[4];
    calls->get_device = (get_device_t)(uintptr_t)found[5];
    calls->set_device = (set_device_t)(uintptr_t)found[6];
    calls->exchange_capture_mode = (capture_mode_t)(uintptr_t)found[7];
    calls->copy_batch = (copy_batch_t)(uintptr_t)found[8];
    calls->device_of_thread = -1;
    queue_init(&calls->queue, make_calls_in_background);
    return 0;
}

static void calls_dealloc(PyObject *self)
{
    Py_BEGIN_ALLOW_THREADS
    queue_stop(&((Calls *)self)->queue);
    Py_END_ALLOW_THREADS
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef calls_methods[] = {
    {"record", (PyCFunction)(void (*)(void))calls_record, METH_FASTCALL, "cudaEventRecord(event, stream)"},
    {"wait", (PyCFunction)(void (*)(void))calls_wait, METH_FASTCALL, "cudaStreamWaitEvent(stream, event, 0)"},
    {"wait_stream", (PyCFunction)(void (*)(void))calls_wait_stream, METH_FASTCALL,
     "cudaEventRecord(event, leader) and cudaStreamWaitEvent(stream, event, 0); takes (stream, event, leader)"},
    {"query", (PyCFunction)(void (*)(void))calls_query, METH_FASTCALL, "cudaEventQuery(event)"},
    {"copy_all", (PyCFunction)(void (*)(void))calls_copy_all, METH_FASTCALL,
     "cudaMemcpyBatchAsync, or cudaMemcpyAsync for each, then cudaEventRecord; takes (stream, event, kind) and a list: "
     "target, source and size of each copy"},
    {"routine", calls_routine, METH_VARARGS,
     "Return calls in a row, which are made at once; takes their numbers, a device, and what is called with the routine "
     "and a code where not all were made."},
    {"settle", calls_settle, METH_NOARGS,
     "Return when all calls that routines have left to the thread are made, with the first error of theirs."},
    {"last_error", calls_last_error, METH_NOARGS, "cudaGetLastError()"},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject CallsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "offload_engine._devices._cuda_calls.Calls",
    .tp_doc = "Functions of the CUDA runtime, by their addresses.",
    .tp_basicsize = sizeof(Calls),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = calls_dealloc,
    .tp_methods = calls_methods,
    .tp_init = calls_init,
    .tp_new = PyType_GenericNew,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_cuda_calls", .m_size = -1};

PyMODINIT_FUNC PyInit__cuda_calls(void)
{
    PyObject *created;
    if (PyType_Ready(&CallsType) < 0 || PyType_Ready(&RoutineType) < 0)
        return NULL;
    created = PyModule_Create(&module);
    if (created != NULL && PyModule_AddObjectRef(created, "Calls", (PyObject *)&CallsType) < 0)
        Py_CLEAR(created);
    return created;
}
