//! What can go wrong in the store, with what was expected and what was found.

use std::path::PathBuf;

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoKind {
    /// From the file into an arena.
    Read,
    /// From an arena into the file.
    Write,
}

impl std::fmt::Display for IoKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            IoKind::Read => "read",
            IoKind::Write => "write",
        })
    }
}

/// Where in the store a transfer began, for messages: `(layer, group)`, or the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Layer and group of the first record, `None` for bytes in front of the records.
    pub record: Option<(u32, u32)>,
    /// Offset in the store file, in bytes.
    pub file_offset: u64,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.record {
            Some((layer, group)) => write!(f, "layer {layer}, group {group} (offset {})", self.file_offset),
            None => write!(f, "offset {}", self.file_offset),
        }
    }
}

/// Every error of the store. An operating system error is kept as its number, so that the value can be cloned
/// and a latched error told again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The store directory does not exist.
    #[error("store directory {}: does not exist; create it or name another", .0.display())]
    DirAbsent(PathBuf),
    /// The store path is there but is no directory.
    #[error("store directory {}: is not a directory", .0.display())]
    DirNotDirectory(PathBuf),
    /// The store directory cannot be written.
    #[error("store directory {}: cannot be written ({}); it must be writable", .path.display(), errno_text(*.errno))]
    DirNotWritable {
        /// The directory.
        path: PathBuf,
        /// Operating system error number.
        errno: i32,
    },
    /// A file system call on the store failed in set-up.
    #[error("{call} in store directory {}: {}", .path.display(), errno_text(*.errno))]
    Setup {
        /// The call.
        call: &'static str,
        /// The directory.
        path: PathBuf,
        /// Operating system error number.
        errno: i32,
    },
    /// The disk has no room for the store.
    #[error("store directory {}: the store needs {needed_bytes} bytes, {free_bytes} are free", .path.display())]
    NoSpace {
        /// The directory.
        path: PathBuf,
        /// Size of the store file.
        needed_bytes: u64,
        /// What the file system would give us.
        free_bytes: u64,
    },
    /// A geometry whose sizes do not fit their types, or are zero.
    #[error("store layout: {what} is {found}, expected {expected}")]
    Layout {
        /// The field.
        what: &'static str,
        /// What it was.
        found: u64,
        /// What it may be.
        expected: &'static str,
    },
    /// A file that is not a store, or one of another version, model or geometry.
    #[error("store header: {field} is {found}, expected {expected}")]
    Header {
        /// The field.
        field: &'static str,
        /// What the file says.
        found: String,
        /// What was wanted.
        expected: String,
    },
    /// A group or layer that the store does not have, or a list that does not ascend.
    #[error("store request: {what} is {found}, expected {expected}")]
    Request {
        /// The argument.
        what: &'static str,
        /// What it was.
        found: u64,
        /// The bound it breaks.
        expected: u64,
    },
    /// A transfer that breaks the direct-I/O alignment.
    #[error("{kind} at {place}: {what} {found} is not a multiple of {align}")]
    Misaligned {
        /// Direction.
        kind: IoKind,
        /// Where.
        place: Place,
        /// Which of offset, length and address.
        what: &'static str,
        /// Its value.
        found: u64,
        /// The alignment.
        align: u32,
    },
    /// A buffer that is not inside its region, or a region that does not exist.
    #[error("buffer: {length} bytes at {offset} of region {region}, which has {region_bytes} bytes")]
    BufferRange {
        /// Region index.
        region: u32,
        /// Start in the region.
        offset: u64,
        /// Length.
        length: u64,
        /// Size of the region, 0 where there is none of that index.
        region_bytes: u64,
    },
    /// A buffer that a transfer in flight still owns.
    #[error("buffer: {length} bytes at {offset} of region {region} overlap a transfer in flight")]
    BufferBusy {
        /// Region index.
        region: u32,
        /// Start in the region.
        offset: u64,
        /// Length.
        length: u64,
    },
    /// A group is to be overwritten while a read of it has not been waited for.
    #[error("write of layer {layer}, group {group}: a read of it has not been waited for")]
    GroupBusy {
        /// Layer.
        layer: u32,
        /// First group of the write.
        group: u32,
    },
    /// A group is read that was never written.
    #[error("read of layer {layer}, group {group}: it was never written")]
    NeverWritten {
        /// Layer.
        layer: u32,
        /// Group.
        group: u32,
    },
    /// More batches or transfers at once than the store was opened for.
    #[error("store queue: {what} is full at {limit}")]
    QueueFull {
        /// Which queue.
        what: &'static str,
        /// Its bound.
        limit: usize,
    },
    /// A ticket that was already waited for.
    #[error("ticket {0} was already waited for or belongs to another store")]
    StaleTicket(u64),
    /// The device failed a transfer.
    #[error("{kind} of {bytes} bytes at {place}: {}", errno_text(*.errno))]
    Io {
        /// Direction.
        kind: IoKind,
        /// Where.
        place: Place,
        /// Length asked for.
        bytes: u64,
        /// Operating system error number.
        errno: i32,
    },
    /// The disk filled up under a write.
    #[error("write of {bytes} bytes at {place}: no space left on the device")]
    DiskFull {
        /// Where.
        place: Place,
        /// Length asked for.
        bytes: u64,
    },
    /// The device moved nothing where bytes were due.
    #[error("{kind} of {bytes} bytes at {place}: ended after {done} bytes")]
    Truncated {
        /// Direction.
        kind: IoKind,
        /// Where.
        place: Place,
        /// Length asked for.
        bytes: u64,
        /// Length moved.
        done: u64,
    },
    /// The device asked to try again more often than is reasonable.
    #[error("{kind} of {bytes} bytes at {place}: still {} after {tries} tries", errno_text(*.errno))]
    Retries {
        /// Direction.
        kind: IoKind,
        /// Where.
        place: Place,
        /// Length asked for.
        bytes: u64,
        /// The last error number, 0 for a transfer that kept being too short to count.
        errno: i32,
        /// How often it was tried.
        tries: u32,
    },
    /// A record is not what was written, twice in a row.
    #[error(
        "layer {layer}, group {group} (offset {file_offset}) is damaged: CRC32C {found:#010x}, expected {expected:#010x}"
    )]
    Corrupt {
        /// Layer.
        layer: u32,
        /// Group.
        group: u32,
        /// Offset in the store file.
        file_offset: u64,
        /// Checksum kept in memory.
        expected: u32,
        /// Checksum of what was read.
        found: u32,
    },
    /// An earlier write failed; the store takes no more requests.
    #[error("the store is closed by an earlier failure: {0}")]
    Latched(Box<StoreError>),
    /// The write budget of the session is used up.
    #[error("write budget: {wanted_bytes} more bytes after {written_bytes}, the budget is {budget_bytes}")]
    WriteBudget {
        /// Bytes of the refused write.
        wanted_bytes: u64,
        /// Bytes written so far.
        written_bytes: u64,
        /// The budget.
        budget_bytes: u64,
    },
    /// Memory for an arena could not be had.
    #[error("mapping an arena of {bytes} bytes: {}", errno_text(*.errno))]
    Memory {
        /// Size asked for.
        bytes: u64,
        /// Operating system error number.
        errno: i32,
    },
    /// The forced I/O backend does not work here.
    #[error("I/O backend {backend}: {what}: {}", errno_text(*.errno))]
    Backend {
        /// Its name.
        backend: &'static str,
        /// What failed.
        what: &'static str,
        /// Operating system error number, 0 where there is none.
        errno: i32,
    },
}

/// The system's words for an error number.
pub(crate) fn errno_text(errno: i32) -> String {
    if errno == 0 { "not supported".to_owned() } else { std::io::Error::from_raw_os_error(errno).to_string() }
}
