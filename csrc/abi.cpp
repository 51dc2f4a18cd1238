// The SHA-256 of the kit's header that the library was built of: beside a csrc/ with another one Python refuses it.
extern "C" __attribute__((visibility("default"))) const char* threefold_header(void) { return THREEFOLD_HEADER; }
