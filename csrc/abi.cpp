// The version of the C ABI between the libraries and the Python that calls them; raised with every change of a signature.
extern "C" __attribute__((visibility("default"))) int threefold_abi_version(void) { return 3; }
