//! Ctrl-C and SIGTERM end a program cleanly: the handler only stores to atomics, the work notices and returns.

use crate::program::{Failure, Outcome};
use forebay::CancelHandle;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
/// Handle of the session that works now; what it points to is never freed.
static CURRENT: AtomicPtr<CancelHandle> = AtomicPtr::new(ptr::null_mut());

extern "C" fn on_signal(_signal: i32) {
    INTERRUPTED.store(true, Ordering::SeqCst);
    let current = CURRENT.load(Ordering::SeqCst);
    // SAFETY: `watch` stores only pointers to leaked, hence immortal handles, and hands out no `&mut` to them.
    if let Some(handle) = unsafe { current.as_ref() } {
        handle.cancel();
    }
}

/// Takes SIGINT and SIGTERM over. The second one ends the program at once, as without a handler.
pub fn install() -> Outcome<()> {
    // No SA_RESTART: a read of standard input that waits for a person returns.
    let action = SigAction::new(SigHandler::Handler(on_signal), SaFlags::SA_RESETHAND, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        // SAFETY: the handler only stores to atomics, which is async-signal-safe.
        unsafe { sigaction(signal, &action) }.map_err(|e| Failure::Fault(format!("{signal}: {e}")))?;
    }
    Ok(())
}

/// Lets a signal cancel this session from now on.
pub fn watch(handle: CancelHandle) {
    // A few bytes per session are leaked on purpose: a handler may be reading the old handle at this moment.
    CURRENT.store(Box::leak(Box::new(handle)), Ordering::SeqCst);
    if interrupted() {
        // SAFETY: as in `on_signal`: the handle was leaked above or by an earlier call.
        if let Some(handle) = unsafe { CURRENT.load(Ordering::SeqCst).as_ref() } {
            handle.cancel();
        }
    }
}

/// Whether a signal came.
pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}

/// An error once a signal came.
pub fn check() -> Outcome<()> {
    if interrupted() { Err(Failure::Interrupted) } else { Ok(()) }
}
