//! Direct-I/O alignment of a file, and whether direct I/O works at all.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{AtFlags, StatxFlags};

/// Alignment where neither the file system nor the device says anything.
pub const FALLBACK_ALIGN: u32 = 4096;

/// Largest alignment that is believed; more is a broken report.
const ALIGN_MAX: u32 = 65536;

/// `statfs` type of tmpfs, which accepts `O_DIRECT` on new kernels and serves it from the page cache all the same.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// The same of ramfs.
const RAMFS_MAGIC: u64 = 0x8584_58f6;

/// What transfers of a file have to be aligned to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Buffer address, bytes.
    pub memory: u32,
    /// File offset and length, bytes.
    pub offset: u32,
}

impl Alignment {
    /// Length rounded up to the offset alignment, `None` where that overflows.
    pub fn round_up(&self, bytes: u64) -> Option<u64> {
        bytes.checked_next_multiple_of(u64::from(self.offset))
    }
}

/// Alignment for the file: `statx` `STATX_DIOALIGN`, else the device's logical block size, else 4096. `None` where
/// the file system says that it has no direct I/O.
pub(crate) fn direct_alignment(file: BorrowedFd<'_>) -> Option<Alignment> {
    if is_in_memory(file) {
        return None;
    }
    let flags = StatxFlags::DIOALIGN | StatxFlags::BASIC_STATS;
    let fallback = Alignment { memory: FALLBACK_ALIGN, offset: FALLBACK_ALIGN };
    let Ok(stat) = rustix::fs::statx(file.as_fd(), c"", AtFlags::EMPTY_PATH, flags) else { return Some(fallback) };
    if StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::DIOALIGN) {
        let (memory, offset) = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
        if memory == 0 || offset == 0 {
            return None;
        }
        if [memory, offset].iter().all(|&a| a.is_power_of_two() && a <= ALIGN_MAX) {
            return Some(Alignment { memory, offset });
        }
        return Some(fallback);
    }
    let block = logical_block_bytes(stat.stx_dev_major, stat.stx_dev_minor).unwrap_or(FALLBACK_ALIGN);
    Some(Alignment { memory: block, offset: block })
}

/// Whether the file system has no device beneath it.
pub(crate) fn is_in_memory(file: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|fs| [TMPFS_MAGIC, RAMFS_MAGIC].contains(&(fs.f_type as u64)))
}

/// The kernel's logical block size of a device, or of the disk that a partition lies on.
fn logical_block_bytes(major: u32, minor: u32) -> Option<u32> {
    ["queue", "../queue"].iter().find_map(|queue| {
        let path = format!("/sys/dev/block/{major}:{minor}/{queue}/logical_block_size");
        let size: u32 = std::fs::read_to_string(path).ok()?.trim().parse().ok()?;
        (size.is_power_of_two() && (512..=ALIGN_MAX).contains(&size)).then_some(size)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding() {
        let align = Alignment { memory: 4, offset: 512 };
        assert_eq!(align.round_up(1), Some(512));
        assert_eq!(align.round_up(1024), Some(1024));
        assert_eq!(align.round_up(u64::MAX), None);
    }

    #[test]
    fn no_device_no_block_size() {
        assert_eq!(logical_block_bytes(u32::MAX, 0), None);
    }
}
