//! The store file: directory checks, creation without a name, reservation of its space.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{Advice, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use super::dio::{self, Alignment, FALLBACK_ALIGN};
use super::{StoreError, StoreLayout};

/// An open file without a name.
pub(crate) struct StoreFile {
    pub(crate) fd: OwnedFd,
    pub(crate) direct: bool,
    /// No device beneath: reads are copies.
    pub(crate) in_memory: bool,
    pub(crate) alignment: Alignment,
}

/// What transfers in a store directory must be aligned to. Makes a nameless file there, so it also tells a directory
/// that cannot be used.
pub fn probe(dir: &Path) -> Result<Alignment, StoreError> {
    open(dir, false).map(|file| file.alignment)
}

/// Makes a nameless file in `dir`, for direct I/O unless `buffered` or where there is none. Mode 0600.
pub(crate) fn open(dir: &Path, buffered: bool) -> Result<StoreFile, StoreError> {
    check_directory(dir)?;
    if !buffered
        && let Some(fd) = open_nameless(dir, OFlags::DIRECT)?
        && let Some(alignment) = dio::direct_alignment(fd.as_fd())
    {
        return Ok(StoreFile { fd, direct: true, in_memory: false, alignment });
    }
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        let why = if buffered { "as asked" } else { "the file system has no direct I/O" };
        log::info!("store: buffered I/O in {} ({why})", dir.display());
    });
    let fd = open_nameless(dir, OFlags::empty())?.ok_or_else(|| setup("open", dir, Errno::INVAL))?;
    // Records are met in no order, so reading ahead of them is waste. Refused advice is no error.
    let _ = rustix::fs::fadvise(&fd, 0, None, Advice::Random);
    // The page cache takes any alignment; keeping the file system's own makes a layout independent of the choice.
    let alignment =
        dio::direct_alignment(fd.as_fd()).unwrap_or(Alignment { memory: FALLBACK_ALIGN, offset: FALLBACK_ALIGN });
    let in_memory = dio::is_in_memory(fd.as_fd());
    Ok(StoreFile { fd, direct: false, in_memory, alignment })
}

fn setup(call: &'static str, dir: &Path, e: Errno) -> StoreError {
    StoreError::Setup { call, path: dir.to_owned(), errno: e.raw_os_error() }
}

fn check_directory(dir: &Path) -> Result<(), StoreError> {
    match rustix::fs::stat(dir) {
        Ok(stat) if rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir() => Ok(()),
        Ok(_) | Err(Errno::NOTDIR) => Err(StoreError::DirNotDirectory(dir.to_owned())),
        Err(Errno::NOENT) => Err(StoreError::DirAbsent(dir.to_owned())),
        Err(e) => Err(setup("stat", dir, e)),
    }
}

/// A nameless file, or `None` where the file system refuses `extra` (no direct I/O).
fn open_nameless(dir: &Path, extra: OFlags) -> Result<Option<OwnedFd>, StoreError> {
    let mode = Mode::RUSR | Mode::WUSR;
    let flags = OFlags::RDWR | OFlags::CLOEXEC | extra;
    match rustix::fs::open(dir, flags | OFlags::TMPFILE, mode) {
        Ok(fd) => Ok(Some(fd)),
        // Kernels and file systems without O_TMPFILE see a directory opened for writing, or an unknown flag. EINVAL
        // means the missing direct I/O as well; the named way tells which.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => open_unlinked(dir, flags, mode),
        Err(e) => Err(open_error(dir, e)),
    }
}

/// The way for file systems without `O_TMPFILE`: a fresh name, unlinked at once.
fn open_unlinked(dir: &Path, flags: OFlags, mode: Mode) -> Result<Option<OwnedFd>, StoreError> {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    /// Names that may be taken by somebody else before we give up.
    const NAMES_MAX: u32 = 100;
    for _ in 0..NAMES_MAX {
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let nanos =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.subsec_nanos());
        let path = dir.join(format!(".forebay-{}-{serial}-{nanos:08x}.kv", std::process::id()));
        match rustix::fs::open(&path, flags | OFlags::CREATE | OFlags::EXCL, mode) {
            Ok(fd) => {
                rustix::fs::unlink(&path).map_err(|e| setup("unlink", dir, e))?;
                return Ok(Some(fd));
            }
            Err(Errno::EXIST) => {}
            Err(Errno::INVAL) => {
                // Some file systems create the file before they look at the flag.
                let _ = rustix::fs::unlink(&path);
                return Ok(None);
            }
            Err(e) => return Err(open_error(dir, e)),
        }
    }
    Err(setup("open", dir, Errno::EXIST))
}

fn open_error(dir: &Path, e: Errno) -> StoreError {
    match e {
        Errno::ACCESS | Errno::PERM | Errno::ROFS => {
            StoreError::DirNotWritable { path: dir.to_owned(), errno: e.raw_os_error() }
        }
        Errno::NOSPC | Errno::DQUOT => StoreError::NoSpace { path: dir.to_owned(), needed_bytes: 1, free_bytes: 0 },
        e => setup("open", dir, e),
    }
}

/// Reserves the whole file, so that a full disk is an error now and not in the middle of prefill.
pub(crate) fn reserve(file: &StoreFile, dir: &Path, layout: &StoreLayout) -> Result<(), StoreError> {
    let needed_bytes = layout.file_bytes();
    let free_bytes = || {
        rustix::fs::fstatvfs(&file.fd).map(|fs| {
            let blocks = if rustix::process::geteuid().is_root() { fs.f_bfree } else { fs.f_bavail };
            blocks.saturating_mul(fs.f_frsize)
        })
    };
    let no_space = |free_bytes| StoreError::NoSpace { path: dir.to_owned(), needed_bytes, free_bytes };
    let free = free_bytes().map_err(|e| setup("statvfs", dir, e))?;
    if free < needed_bytes {
        return Err(no_space(free));
    }
    match rustix::io::retry_on_intr(|| rustix::fs::fallocate(&file.fd, FallocateFlags::empty(), 0, needed_bytes)) {
        Ok(()) => Ok(()),
        Err(Errno::NOSPC | Errno::DQUOT) => Err(no_space(free)),
        // Nothing to reserve with: the check above is what there is.
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            rustix::fs::ftruncate(&file.fd, needed_bytes).map_err(|e| setup("ftruncate", dir, e))
        }
        Err(e) => Err(setup("fallocate", dir, e)),
    }
}
