//! CRC32C of every record, kept in memory and apart from the data, so that a write that went astray is seen too.

use super::StoreLayout;

/// Which records were written, and the checksum of each.
pub(crate) struct ChecksumTable {
    /// By record; empty where checksums are off.
    crcs: Vec<u32>,
    /// One bit per record.
    written: Vec<u64>,
}

/// Bytes of the checksum table of a store: 4 per record.
pub fn crc_table_bytes(layout: &StoreLayout) -> u64 {
    4 * layout.records()
}

/// Bytes of the table of written records: a bit per record.
pub fn written_table_bytes(layout: &StoreLayout) -> u64 {
    8 * layout.records().div_ceil(64)
}

impl ChecksumTable {
    pub(crate) fn new(layout: &StoreLayout, checksums: bool) -> Self {
        let records = layout.records() as usize;
        Self { crcs: if checksums { vec![0; records] } else { Vec::new() }, written: vec![0; records.div_ceil(64)] }
    }

    /// Whether checksums are kept.
    pub(crate) fn enabled(&self) -> bool {
        !self.crcs.is_empty()
    }

    /// Notes a record that is about to be written.
    pub(crate) fn record(&mut self, index: usize, data: impl FnOnce() -> u32) {
        self.written[index / 64] |= 1 << (index % 64);
        if let Some(crc) = self.crcs.get_mut(index) {
            *crc = data();
        }
    }

    pub(crate) fn is_written(&self, index: usize) -> bool {
        self.written[index / 64] >> (index % 64) & 1 == 1
    }

    /// Expected checksum of a record where it is not `found`.
    pub(crate) fn expected_instead(&self, index: usize, found: u32) -> Option<u32> {
        self.crcs.get(index).copied().filter(|&expected| expected != found)
    }
}
