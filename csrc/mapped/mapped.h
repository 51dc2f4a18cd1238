// Reads of memory that may be a mapped file. Where the file was cut short meanwhile, or its disk does not answer, the system
// sends SIGBUS: here that becomes a result, so that a program can name the file, save what it has and end.
#pragma once

namespace mapped {

// Calls work(context), which reads mapped memory and on this thread owns nothing: no destructor runs if it is left early.
// Returns null, or the address that could not be read. Calls may be nested; the innermost ends.
const void* guarded(void (*work)(void*), void* context);

template <typename Work>
const void* read(const Work& work) {
  return guarded([](void* context) { (*static_cast<const Work*>(context))(); }, const_cast<Work*>(&work));
}

// Notes an address for the caller of a C function on this thread, who asks for it after -EFAULT.
int unread(const void* address);
const void* last_unread();

}  // namespace mapped
