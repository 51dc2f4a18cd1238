// A handler of SIGBUS, put in place at the first guarded read. In a thread that reads so it goes back to where the reading
// began; everything else goes to the handler before it. It calls nothing of Python's, and takes no memory.
#include "mapped.h"

#include <csetjmp>
#include <csignal>
#include <cerrno>
#include <unistd.h>

namespace mapped {
namespace {

struct Reading {
  sigjmp_buf place;
  const void* address;
};

thread_local Reading* volatile current = nullptr;
thread_local const void* noted = nullptr;
struct sigaction before;
const char unknown = 0;  // its address is noted if the signal has none

void pass_on(int number, siginfo_t* info, void* context) {
  if (before.sa_flags & SA_SIGINFO) return before.sa_sigaction(number, info, context);
  if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) return before.sa_handler(number);
  if (before.sa_handler == SIG_IGN && info->si_code <= 0) return;
  signal(number, SIG_DFL);  // a read that failed is made again, and ends the process
  if (info->si_code <= 0) raise(number);
}

void handle(int number, siginfo_t* info, void* context) {
  Reading* const reading = current;
  const bool by_read = info->si_code > 0;
  // Handlers such as Python's faulthandler, put in place later, raise the signal again.
  const bool again = info->si_code == SI_TKILL && info->si_pid == getpid();
  if (reading == nullptr || !(by_read || again)) return pass_on(number, info, context);
  reading->address = by_read ? info->si_addr : &unknown;
  siglongjmp(reading->place, 1);
}

bool install() {
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;  // it is left without a return, so nothing may stay blocked
  sigemptyset(&action.sa_mask);
  return sigaction(SIGBUS, nullptr, &before) == 0 && sigaction(SIGBUS, &action, nullptr) == 0;
}

}  // namespace

const void* guarded(void (*work)(void*), void* context) {
  static const bool installed = install();
  (void)installed;
  Reading reading;
  reading.address = nullptr;
  Reading* const outer = current;
  if (sigsetjmp(reading.place, 0) == 0) {
    current = &reading;
    work(context);
  }
  current = outer;
  return static_cast<volatile Reading&>(reading).address;
}

int unread(const void* address) {
  noted = address;
  return -EFAULT;
}

const void* last_unread() { return noted; }

}  // namespace mapped
