// What every function of a C ABI does with exceptions: none leaves it.
#pragma once

#include <new>
#include <stdexcept>
#include <system_error>

// Returns work(), or `no_memory` if that finds no memory, or asks for more than there can be.
template <typename Work, typename Result>
Result without_throw(Result no_memory, const Work& work) noexcept {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return no_memory;
  } catch (const std::length_error&) {
    return no_memory;
  } catch (const std::system_error&) {  // of a lock or a thread
    return no_memory;
  }
}
