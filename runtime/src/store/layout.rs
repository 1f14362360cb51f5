//! Geometry of a store file and its header.
//!
//! ```text
//! [header][layer 0: groups 0..cap][layer 1: ...]...
//! ```
//! The header takes 4096 bytes, or one alignment unit where that is larger. Group `g` of layer `l` lies at
//! `header + (l*cap + g)*stride`; the stride is the record length rounded up to the direct-I/O alignment.

use super::error::Place;
use super::{Alignment, StoreError};

/// Bytes of the header on devices whose alignment is not larger.
pub const HEADER_BYTES: u32 = 4096;
/// First eight bytes of a store file.
pub const MAGIC: [u8; 8] = *b"FOREBAYS";
/// Version of the store file's format.
pub const VERSION: u32 = 1;
/// Used bytes of the header; the rest is zero.
const HEADER_USED: usize = 80;

/// Sizes and offsets of a store file. All products are checked when it is made, so that none overflows later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreLayout {
    layers: u32,
    groups_per_layer: u32,
    record_bytes: u32,
    stride: u32,
    header_bytes: u32,
}

impl StoreLayout {
    /// Layout of `layers` x `groups_per_layer` records of `record_bytes` bytes, aligned for direct I/O.
    ///
    /// A zero count, a stride above 1 GiB and a file above `i64::MAX` bytes are errors.
    pub fn new(
        layers: u32,
        groups_per_layer: u32,
        record_bytes: u32,
        alignment: Alignment,
    ) -> Result<Self, StoreError> {
        let error = |what, found: u64, expected| StoreError::Layout { what, found, expected };
        for (what, found) in
            [("layers", layers), ("groups per layer", groups_per_layer), ("record bytes", record_bytes)]
        {
            if found == 0 {
                return Err(error(what, 0, "at least 1"));
            }
        }
        if alignment.offset == 0 {
            return Err(error("alignment", 0, "at least 1"));
        }
        let stride = record_bytes
            .checked_next_multiple_of(alignment.offset)
            .filter(|&stride| stride <= 1 << 30)
            .ok_or(error("record bytes", record_bytes.into(), "at most 1 GiB with alignment"))?;
        let header_bytes = HEADER_BYTES.checked_next_multiple_of(alignment.offset).ok_or(error(
            "alignment",
            alignment.offset.into(),
            "a power of two of reasonable size",
        ))?;
        u64::from(layers)
            .checked_mul(groups_per_layer.into())
            .and_then(|records| records.checked_mul(stride.into()))
            .and_then(|bytes| bytes.checked_add(header_bytes.into()))
            .filter(|&bytes| bytes <= i64::MAX as u64)
            .ok_or(error("groups per layer", groups_per_layer.into(), "a file of less than 2^63 bytes"))?;
        Ok(Self { layers, groups_per_layer, record_bytes, stride, header_bytes })
    }

    /// Layers.
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// Groups that each layer has room for.
    pub fn groups_per_layer(&self) -> u32 {
        self.groups_per_layer
    }

    /// Bytes of a record that carry data and are covered by its checksum.
    pub fn record_bytes(&self) -> u32 {
        self.record_bytes
    }

    /// Bytes from a record to the next, in the file and in every buffer that transfers touch.
    pub fn stride(&self) -> u32 {
        self.stride
    }

    /// Bytes in front of the first record.
    pub fn header_bytes(&self) -> u32 {
        self.header_bytes
    }

    /// Size of the file.
    pub fn file_bytes(&self) -> u64 {
        u64::from(self.header_bytes) + self.records() * u64::from(self.stride)
    }

    /// Records in the file.
    pub fn records(&self) -> u64 {
        u64::from(self.layers) * u64::from(self.groups_per_layer)
    }

    /// Number of a record, counted through all layers.
    pub(crate) fn record_index(&self, layer: u32, group: u32) -> usize {
        debug_assert!(layer < self.layers && group < self.groups_per_layer);
        layer as usize * self.groups_per_layer as usize + group as usize
    }

    /// File offset of a record, in bytes.
    pub fn file_offset(&self, layer: u32, group: u32) -> u64 {
        u64::from(self.header_bytes) + self.record_index(layer, group) as u64 * u64::from(self.stride)
    }

    /// Errors where `first_group..first_group + count` of `layer` is not inside the store, or is empty.
    pub fn check_range(&self, layer: u32, first_group: u32, count: u32) -> Result<(), StoreError> {
        let bound = |what, found: u64, expected: u64| Err(StoreError::Request { what, found, expected });
        if layer >= self.layers {
            return bound("layer", layer.into(), u64::from(self.layers) - 1);
        }
        if count == 0 {
            return bound("group count", 0, 1);
        }
        let end = u64::from(first_group) + u64::from(count);
        if end > u64::from(self.groups_per_layer) {
            return bound("last group", end - 1, u64::from(self.groups_per_layer) - 1);
        }
        Ok(())
    }

    /// What lies at a file offset, for messages.
    pub fn place(&self, file_offset: u64) -> Place {
        let record = file_offset.checked_sub(self.header_bytes.into()).and_then(|bytes| {
            let index = bytes / u64::from(self.stride);
            let layer = index / u64::from(self.groups_per_layer);
            let group = index % u64::from(self.groups_per_layer);
            (layer < u64::from(self.layers)).then_some((layer as u32, group as u32))
        });
        Place { record, file_offset }
    }

    /// The header: magic 0..8, version 8..12, header bytes 12..16, layers 16..20, groups per layer 20..24, record
    /// bytes 24..28, stride 28..32, reserved (zero) 32..44, fingerprint 44..76, CRC32C of 0..76 at 76..80, little-endian.
    pub fn encode_header(&self, fingerprint: &[u8; 32]) -> [u8; HEADER_USED] {
        let mut header = [0; HEADER_USED];
        header[..8].copy_from_slice(&MAGIC);
        let fields = [VERSION, self.header_bytes, self.layers, self.groups_per_layer, self.record_bytes, self.stride];
        for (bytes, field) in header[8..32].chunks_exact_mut(4).zip(fields) {
            bytes.copy_from_slice(&field.to_le_bytes());
        }
        header[44..76].copy_from_slice(fingerprint);
        let crc = crc32c::crc32c(&header[..76]);
        header[76..].copy_from_slice(&crc.to_le_bytes());
        header
    }

    /// Layout and fingerprint of a header. Anything that is not exactly what [`StoreLayout::encode_header`] would
    /// write is an error that says what was found.
    pub fn decode_header(bytes: &[u8]) -> Result<(Self, [u8; 32]), StoreError> {
        let error = |field, found: String, expected: String| StoreError::Header { field, found, expected };
        let header: &[u8; HEADER_USED] = bytes.first_chunk().ok_or_else(|| {
            error("length", format!("{} bytes", bytes.len()), format!("at least {HEADER_USED} bytes"))
        })?;
        if header[..8] != MAGIC {
            return Err(error("magic", format!("{:02x?}", &header[..8]), format!("{MAGIC:02x?}")));
        }
        let field = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        if field(8) != VERSION {
            return Err(error("version", field(8).to_string(), VERSION.to_string()));
        }
        let crc = crc32c::crc32c(&header[..76]);
        if field(76) != crc {
            return Err(error("checksum", format!("{:#010x}", field(76)), format!("{crc:#010x}")));
        }
        let layout = Self::new(field(16), field(20), field(24), Alignment { memory: 1, offset: 1 })?;
        if field(28) < field(24) || field(28) > 1 << 30 {
            return Err(error("stride", field(28).to_string(), format!("{} to 1 GiB", field(24))));
        }
        if field(12) < HEADER_BYTES {
            return Err(error("header bytes", field(12).to_string(), format!("at least {HEADER_BYTES}")));
        }
        let layout = Self { stride: field(28), header_bytes: field(12), ..layout };
        layout
            .records()
            .checked_mul(layout.stride.into())
            .and_then(|bytes| bytes.checked_add(layout.header_bytes.into()))
            .filter(|&bytes| bytes <= i64::MAX as u64)
            .ok_or_else(|| error("geometry", "more than 2^63 bytes".into(), "a file that can exist".into()))?;
        let mut fingerprint = [0; 32];
        fingerprint.copy_from_slice(&header[44..76]);
        Ok((layout, fingerprint))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALIGN: Alignment = Alignment { memory: 512, offset: 512 };

    #[test]
    fn offsets_follow_the_format() {
        let layout = StoreLayout::new(3, 10, 700, ALIGN).unwrap();
        assert_eq!(layout.stride(), 1024);
        assert_eq!(layout.file_offset(0, 0), 4096);
        assert_eq!(layout.file_offset(2, 7), 4096 + 27 * 1024);
        assert_eq!(layout.file_bytes(), 4096 + 30 * 1024);
        assert_eq!(layout.place(4096 + 27 * 1024 + 5).record, Some((2, 7)));
        assert_eq!(layout.place(12).record, None);
        assert_eq!(layout.place(4096 + 30 * 1024).record, None);
        let wide = StoreLayout::new(1, 1, 1, Alignment { memory: 4, offset: 16384 }).unwrap();
        assert_eq!((wide.header_bytes(), wide.stride()), (16384, 16384));
    }

    #[test]
    fn absurd_geometry_is_an_error() {
        for (layers, groups, record) in
            [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, u32::MAX), (u32::MAX, u32::MAX, 1 << 20)]
        {
            assert!(matches!(StoreLayout::new(layers, groups, record, ALIGN), Err(StoreError::Layout { .. })));
        }
        let layout = StoreLayout::new(2, 4, 512, ALIGN).unwrap();
        assert!(layout.check_range(1, 0, 4).is_ok());
        for (layer, first, count) in [(2, 0, 1), (0, 0, 0), (0, 4, 1), (0, 1, 4), (0, u32::MAX, u32::MAX)] {
            assert!(layout.check_range(layer, first, count).is_err());
        }
    }

    #[test]
    fn header_round_trip_and_every_damaged_byte() {
        let layout = StoreLayout::new(30, 2000, 1536, ALIGN).unwrap();
        let header = layout.encode_header(&[9; 32]);
        assert_eq!(StoreLayout::decode_header(&header).unwrap(), (layout, [9; 32]));
        for at in 0..header.len() {
            let mut damaged = header;
            damaged[at] ^= 0x10;
            assert!(StoreLayout::decode_header(&damaged).is_err(), "byte {at}");
        }
        assert!(StoreLayout::decode_header(&header[..79]).is_err());
    }
}
