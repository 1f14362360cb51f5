//! The group store: the KV records of one sequence in one file.
//!
//! A [`Store`] moves records between its file and [`Arena`]s that the caller owns. The computing thread submits a
//! layer's reads as one batch and gets a [`Ticket`]; the disk works while it computes; it waits for the ticket when it
//! needs the data. Writes go the same way, in large pieces.
//!
//! **Whose bytes.** From submission until its ticket was waited for, a read's buffer belongs to the store; a write's
//! buffer must not change until the write is over. The store keeps the arenas alive, and dropping it waits for what is
//! under way. A batch whose buffer is in use is refused.
//!
//! **Order.** Reads go to the device before writes that have not begun. A read of a group whose write is under way
//! waits for that write; a write of a group that an unwaited read wants is refused.
//!
//! **Failure.** A failed batch of reads reports the first error through its ticket and changes nothing else; it can be
//! repeated. A failed write, or a device that stops, closes the store: every later call says so. Every record has a
//! CRC32C in memory; a record that does not match is read once more, then it is an error.
//!
//! **Lifecycle.** The file has no name, mode 0600, and its space is reserved at once, so nothing is left behind
//! however the process ends, and a full disk is an error at the start.

mod arena;
mod backend;
mod batch;
mod checksum;
mod device;
mod dio;
mod engine;
mod error;
mod faulty;
mod file;
mod hold;
mod inline;
mod layout;
mod options;
mod plan;
mod pread;
mod profile;
mod queue;
mod throttle;
mod uring;

pub use arena::{ARENA_ALIGN, Arena, ArenaOptions};
pub use backend::IoBackend;
pub use batch::Ticket;
pub use checksum::{crc_table_bytes, written_table_bytes};
pub use device::{BufferRef, Capabilities, Completion, Device, IoOp, Regions};
pub use dio::{Alignment, FALLBACK_ALIGN};
pub use engine::{PIECE_BYTES, Store, TICKETS_MAX};
pub use error::{IoKind, Place, StoreError};
pub use faulty::{FAULTS, Fault, FaultCounts, FaultOptions};
pub use file::probe;
pub use layout::{HEADER_BYTES, MAGIC, StoreLayout, VERSION};
pub use options::{StoreOptions, StoreStats};
pub use plan::{Extent, PlanLimits, ReadPlan, staging_slots};
pub use pread::{POOL_DEPTH, POOL_THREADS};
pub use profile::{ProfileOptions, ReadSample, profile};
pub use queue::{TRANSFERS_MAX, TRANSIENT_TRIES_MAX, WRITES_IN_DEVICE_MAX};
pub use throttle::{DirectionProfile, DiskClass, DiskProfile};
pub use uring::RING_ENTRIES;

/// A name that is none of those there are.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is unknown, expected one of {expected}")]
pub struct UnknownName {
    /// What was given.
    pub found: String,
    /// What there is.
    pub expected: &'static str,
}
