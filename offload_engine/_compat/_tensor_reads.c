// SPDX-License-Identifier: Apache-2.0
/* What the engine reads of tensors on hot paths, several attributes in one call. tensor_reads.py is the same in Python.
 *
 * Neither torch's headers nor its libraries are needed to build this. The methods and attributes of `torch.Tensor` and
 * `torch.UntypedStorage` are C functions, which Python calls through look-ups and bound arguments that take longer than
 * the read itself. Here each is found once, by its name, when the module is imported, and then called directly.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* A method without arguments, or an attribute. Where no C function is set, Python itself looks the name up. */
typedef struct {
    const char *name;
    PyObject *key;
    int is_method;
    PyCFunction method;
    PyCFunctionWithKeywords method_with_keywords;
    getter get;
    void *closure;
} read_t;

/* Of tensors. */
static read_t read_layout = {"layout"}, read_storage = {"untyped_storage"}, read_device = {"device"},
              read_is_quantized = {"is_quantized"}, read_is_nested = {"is_nested"}, read_base = {"_base"},
              read_version = {"_version"}, read_offset = {"storage_offset"}, read_shape = {"shape"},
              read_stride = {"stride"}, read_dtype = {"dtype"}, read_is_conj = {"is_conj"}, read_is_neg = {"is_neg"};
/* Of dtypes. */
static read_t read_is_complex = {"is_complex"}, read_itemsize = {"itemsize"};
/* Of storages. */
static read_t read_nbytes = {"nbytes"}, read_address = {"data_ptr"}, read_key = {"_cdata"};

static PyTypeObject *tensor_type, *storage_type, *parameter_type, *dtype_type;
static PyObject *strided, *no_arguments;

/* `object` must be an instance of the class in which `read` was found. */
static PyObject *read_of(PyObject *object, const read_t *read)
{
    if (read->get != NULL)
        return read->get(object, read->closure);
    if (read->method != NULL)
        return read->method(object, NULL);
    if (read->method_with_keywords != NULL)
        return read->method_with_keywords(object, no_arguments, NULL);
    return read->is_method ? PyObject_CallMethodNoArgs(object, read->key) : PyObject_GetAttr(object, read->key);
}

/* As `read_of`, for an integer; -1 with an exception set on error. */
static Py_ssize_t number_of(PyObject *object, const read_t *read)
{
    PyObject *value = read_of(object, read);
    Py_ssize_t number = -1;
    if (value != NULL) {
        number = PyLong_AsSsize_t(value);
        Py_DECREF(value);
    }
    return number;
}

/* As `read_of`, for a truth value; -1 with an exception set on error. */
static int truth_of(PyObject *object, const read_t *read)
{
    PyObject *value = read_of(object, read);
    int truth = -1;
    if (value != NULL) {
        truth = PyObject_IsTrue(value);
        Py_DECREF(value);
    }
    return truth;
}

static int check(const char *name, Py_ssize_t given, Py_ssize_t count, PyObject *object, PyTypeObject *type)
{
    if (given != count)
        PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments, got %zd", name, count, given);
    else if (!PyObject_TypeCheck(object, type))
        PyErr_Format(PyExc_TypeError, "%s() takes a %s, got a %s", name, type->tp_name, Py_TYPE(object)->tp_name);
    else
        return 1;
    return 0;
}

/* 1 if `tensor` is on `device` and neither quantized, nested nor a view of a parameter; 0 if not; -1 on error. */
static int is_plain(PyObject *tensor, PyObject *device)
{
    PyObject *found = read_of(tensor, &read_device);
    int answer;
    if (found == NULL)
        return -1;
    answer = PyObject_RichCompareBool(found, device, Py_EQ);
    Py_DECREF(found);
    if (answer == 1)
        answer = truth_of(tensor, &read_is_quantized), answer = answer < 0 ? -1 : !answer;
    if (answer == 1)
        answer = truth_of(tensor, &read_is_nested), answer = answer < 0 ? -1 : !answer;
    if (answer != 1)
        return answer;
    if ((found = read_of(tensor, &read_base)) == NULL)
        return -1;
    answer = !Py_IS_TYPE(found, parameter_type);
    Py_DECREF(found);
    return answer;
}

/* 1 if elements of this size lie one behind the other in the order of the dimensions and take `nbytes` in all; 0 if
 * not; -1 on error. */
static int has_all(PyObject *shape, PyObject *stride, Py_ssize_t itemsize, Py_ssize_t nbytes)
{
    Py_ssize_t numel = 1, num_dims = PyTuple_Check(shape) ? PyTuple_GET_SIZE(shape) : -1;
    if (num_dims < 0 || !PyTuple_Check(stride) || PyTuple_GET_SIZE(stride) != num_dims) {
        PyErr_SetString(PyExc_TypeError, "shape and strides of a tensor must be tuples of one length");
        return -1;
    }
    for (Py_ssize_t i = num_dims - 1; i >= 0; i--) {
        Py_ssize_t size = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, i));
        Py_ssize_t step = PyLong_AsSsize_t(PyTuple_GET_ITEM(stride, i));
        if ((size == -1 || step == -1) && PyErr_Occurred())
            return -1;
        if (size != 1 && step != numel)
            return 0;
        numel *= size;
    }
    return numel * itemsize == nbytes;
}

/* The items of `shape`, whose reference this takes over, as a tuple that is of no class of torch. NULL on error. */
static PyObject *plain(PyObject *shape)
{
    PyObject *items;
    if (shape == NULL || PyTuple_CheckExact(shape))
        return shape;
    items = PyTuple_Check(shape) ? PyTuple_GetSlice(shape, 0, PyTuple_GET_SIZE(shape)) : PySequence_Tuple(shape);
    Py_DECREF(shape);
    return items;
}

/* Offset, shape, strides and dtype of `tensor`; `*is_all` is what `has_all` says of them. NULL on error. */
static PyObject *place_of(PyObject *tensor, Py_ssize_t nbytes, int *is_all)
{
    const read_t *reads[] = {&read_offset, &read_shape, &read_stride, &read_dtype};
    PyObject *place = PyTuple_New(4);
    Py_ssize_t itemsize;
    if (place == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < 4; i++) {
        PyObject *value = read_of(tensor, reads[i]);
        if (i == 1)
            value = plain(value);
        if (value == NULL)
            goto failed;
        PyTuple_SET_ITEM(place, i, value);
    }
    itemsize = number_of(PyTuple_GET_ITEM(place, 3), &read_itemsize);
    if (itemsize < 0)
        goto failed;
    *is_all = has_all(PyTuple_GET_ITEM(place, 1), PyTuple_GET_ITEM(place, 2), itemsize, nbytes);
    if (*is_all >= 0)
        return place;
failed:
    Py_DECREF(place);
    return NULL;
}

/* What is read of a plain tensor; `storage` is its. */
static PyObject *reads_of(PyObject *tensor, PyObject *storage, Py_ssize_t nbytes)
{
    PyObject *address = read_of(storage, &read_address), *key, *version = NULL, *place = NULL, *size = NULL,
             *reads = NULL;
    int is_all = 0, is_lazy;
    if (address == NULL && PyErr_ExceptionMatches(PyExc_RuntimeError)) { /* it has a size, and no bytes */
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    key = address == NULL ? NULL : read_of(storage, &read_key);
    if (key == NULL || (version = read_of(tensor, &read_version)) == NULL ||
        (place = place_of(tensor, nbytes, &is_all)) == NULL)
        goto done;
    is_lazy = truth_of(PyTuple_GET_ITEM(place, 3), &read_is_complex);
    if (is_lazy == 1)
        is_lazy = truth_of(tensor, &read_is_conj);
    if (is_lazy == 0)
        is_lazy = truth_of(tensor, &read_is_neg);
    if (is_lazy >= 0 && (size = PyLong_FromSsize_t(nbytes)) != NULL)
        reads = PyTuple_Pack(8, storage, key, size, address, version, place, is_all ? Py_True : Py_False,
                             is_lazy ? Py_True : Py_False);
    Py_XDECREF(size);
done:
    Py_XDECREF(address);
    Py_XDECREF(key);
    Py_XDECREF(version);
    Py_XDECREF(place);
    return reads;
}

static PyObject *read_plain(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    PyObject *layout, *storage, *reads = NULL;
    Py_ssize_t smallest, nbytes;
    int answer;
    if (!check("read_plain", given, 3, given ? args[0] : Py_None, &PyBaseObject_Type))
        return NULL;
    if (!Py_IS_TYPE(args[0], tensor_type))
        Py_RETURN_NONE;
    smallest = PyLong_AsSsize_t(args[2]);
    if (smallest == -1 && PyErr_Occurred())
        return NULL;
    layout = read_of(args[0], &read_layout);
    if (layout == NULL)
        return NULL;
    Py_DECREF(layout); /* one object for each layout, which torch keeps */
    if (layout != strided)
        Py_RETURN_NONE;
    storage = read_of(args[0], &read_storage);
    if (storage == NULL)
        return NULL;
    nbytes = number_of(storage, &read_nbytes);
    /* True for most tensors, so tested first. */
    answer = nbytes == -1 ? -1 : nbytes < smallest ? 0 : is_plain(args[0], args[1]);
    if (answer >= 0)
        reads = answer ? reads_of(args[0], storage, nbytes) : Py_NewRef(Py_None);
    Py_DECREF(storage);
    return reads;
}

static PyObject *is_unmodified(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    Py_ssize_t expected[2], found[2];
    if (!check("is_unmodified", given, 4, given ? args[0] : Py_None, tensor_type) ||
        !check("is_unmodified", given, 4, args[2], storage_type))
        return NULL;
    for (int i = 0; i < 2; i++) {
        expected[i] = PyLong_AsSsize_t(args[1 + 2 * i]);
        found[i] = i ? number_of(args[2], &read_nbytes) : number_of(args[0], &read_version);
        if ((expected[i] == -1 || found[i] == -1) && PyErr_Occurred())
            return NULL;
        if (expected[i] != found[i])
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyObject *address_of(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    PyObject *storage, *address = NULL;
    Py_ssize_t expected, nbytes;
    if (!check("address_of", given, 2, given ? args[0] : Py_None, tensor_type))
        return NULL;
    expected = PyLong_AsSsize_t(args[1]);
    if (expected == -1 && PyErr_Occurred())
        return NULL;
    storage = read_of(args[0], &read_storage);
    if (storage == NULL)
        return NULL;
    nbytes = number_of(storage, &read_nbytes);
    if (nbytes == expected)
        address = read_of(storage, &read_address);
    else if (nbytes != -1 || !PyErr_Occurred())
        address = Py_NewRef(Py_None);
    Py_DECREF(storage);
    return address;
}

static PyMethodDef functions[] = {
    {"read_plain", (PyCFunction)(void (*)(void))read_plain, METH_FASTCALL, "See tensor_reads.read_plain."},
    {"is_unmodified", (PyCFunction)(void (*)(void))is_unmodified, METH_FASTCALL, "See tensor_reads.is_unmodified."},
    {"address_of", (PyCFunction)(void (*)(void))address_of, METH_FASTCALL, "See tensor_reads.address_of."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_tensor_reads", .m_size = -1, .m_methods = functions};

static int find_read(read_t *read, PyTypeObject *owner)
{
    PyObject *found = PyObject_GetAttrString((PyObject *)owner, read->name);
    if (found == NULL || (read->key = PyUnicode_InternFromString(read->name)) == NULL) {
        Py_XDECREF(found);
        return -1;
    }
    read->is_method = PyCallable_Check(found);
    if (Py_IS_TYPE(found, &PyMethodDescr_Type)) {
        PyMethodDef *method = ((PyMethodDescrObject *)found)->d_method;
        if (method->ml_flags == METH_NOARGS)
            read->method = method->ml_meth;
        else if (method->ml_flags == (METH_VARARGS | METH_KEYWORDS))
            read->method_with_keywords = (PyCFunctionWithKeywords)(void (*)(void))method->ml_meth;
    } else if (Py_IS_TYPE(found, &PyGetSetDescr_Type)) {
        read->get = ((PyGetSetDescrObject *)found)->d_getset->get;
        read->closure = ((PyGetSetDescrObject *)found)->d_getset->closure;
    }
    Py_DECREF(found); /* its class keeps it, for as long as the process lives */
    return 0;
}

static int find_reads(read_t **reads, PyTypeObject *owner)
{
    for (; *reads != NULL; reads++)
        if (find_read(*reads, owner) < 0)
            return -1;
    return 0;
}

static PyTypeObject *find_type(PyObject *module, const char *name)
{
    PyObject *found = module == NULL ? NULL : PyObject_GetAttrString(module, name);
    if (found != NULL && !PyType_Check(found))
        PyErr_Format(PyExc_ImportError, "%s is not a class", name);
    return found != NULL && PyType_Check(found) ? (PyTypeObject *)found : NULL;
}

static int find_all(PyObject *torch, PyObject *nn)
{
    read_t *of_tensors[] = {&read_layout, &read_storage,  &read_device, &read_is_quantized, &read_is_nested,
                            &read_base,   &read_version,  &read_offset, &read_shape,        &read_stride,
                            &read_dtype,  &read_is_conj,  &read_is_neg, NULL};
    read_t *of_dtypes[] = {&read_is_complex, &read_itemsize, NULL};
    read_t *of_storages[] = {&read_nbytes, &read_address, &read_key, NULL};
    tensor_type = find_type(torch, "Tensor");
    storage_type = find_type(torch, "UntypedStorage");
    parameter_type = find_type(nn, "Parameter");
    dtype_type = find_type(torch, "dtype");
    strided = torch == NULL ? NULL : PyObject_GetAttrString(torch, "strided");
    no_arguments = PyTuple_New(0);
    if (tensor_type == NULL || storage_type == NULL || parameter_type == NULL || dtype_type == NULL || !strided || !no_arguments)
        return -1;
    if (find_reads(of_tensors, tensor_type) < 0 || find_reads(of_dtypes, dtype_type) < 0)
        return -1;
    return find_reads(of_storages, storage_type);
}

PyMODINIT_FUNC PyInit__tensor_reads(void)
{
    PyObject *torch = PyImport_ImportModule("torch"), *nn = torch == NULL ? NULL : PyImport_ImportModule("torch.nn");
    int code = nn == NULL ? -1 : find_all(torch, nn);
    Py_XDECREF(torch);
    Py_XDECREF(nn);
    return code < 0 ? NULL : PyModule_Create(&module);
}
