//! Geometry of a group record: `[K][V]`, each `[kv_heads][group][head_dim]` in f16.

use forebay_kernels::attention::KvPiece;
use forebay_kernels::prefill_attention::{KvElement, KvRecords};
use half::f16;
use half::slice::HalfBitsSliceExt;

/// Shape and placement of the records of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLayout {
    /// Key/value heads.
    pub kv_heads: usize,
    /// Values per head.
    pub head_dim: usize,
    /// `G`: tokens per group.
    pub group: usize,
    /// Bytes from one record to the next: the record rounded up to the direct-I/O alignment.
    pub stride: usize,
}

impl GroupLayout {
    /// Layout with records rounded up to `alignment` bytes.
    pub fn new(kv_heads: usize, head_dim: usize, group: usize, alignment: usize) -> GroupLayout {
        let record = Self::bytes_of(kv_heads, head_dim, group);
        GroupLayout { kv_heads, head_dim, group, stride: record.next_multiple_of(alignment.max(1)) }
    }

    fn bytes_of(kv_heads: usize, head_dim: usize, group: usize) -> usize {
        2 * kv_heads * group * head_dim * size_of::<f16>()
    }

    /// Bytes of a record without padding.
    pub fn record_bytes(&self) -> usize {
        Self::bytes_of(self.kv_heads, self.head_dim, self.group)
    }

    /// Values of one token's key, flattened over KV heads.
    pub fn key_dim(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Values of the K plane (and of the V plane) of a record.
    fn plane(&self) -> usize {
        self.kv_heads * self.group * self.head_dim
    }

    fn values<'a>(&self, record: &'a [u8]) -> &'a [f16] {
        bytemuck::cast_slice::<u8, u16>(&record[..self.record_bytes()]).reinterpret_cast()
    }

    /// Writes token `index` of a record from f32 rows `k`, `v`: `[kv_heads][head_dim]`.
    pub fn write_token(&self, record: &mut [u8], index: usize, k: &[f32], v: &[f32]) {
        let d = self.head_dim;
        let values: &mut [u16] = bytemuck::cast_slice_mut(&mut record[..self.record_bytes()]);
        let values: &mut [f16] = values.reinterpret_cast_mut();
        let (k_plane, v_plane) = values.split_at_mut(self.plane());
        for head in 0..self.kv_heads {
            let at = (head * self.group + index) * d;
            for (out, x) in [(&mut *k_plane, k), (&mut *v_plane, v)] {
                for (o, &value) in out[at..at + d].iter_mut().zip(&x[head * d..head * d + d]) {
                    *o = f16::from_f32(value);
                }
            }
        }
    }

    /// [`GroupLayout::write_token`] for a record that holds f32 values, twice as long.
    pub fn write_token_f32(&self, record: &mut [u8], index: usize, k: &[f32], v: &[f32]) {
        let (d, plane) = (self.head_dim, self.plane());
        let values: &mut [f32] = bytemuck::cast_slice_mut(&mut record[..2 * self.record_bytes()]);
        let (k_plane, v_plane) = values.split_at_mut(plane);
        for head in 0..self.kv_heads {
            let at = (head * self.group + index) * d;
            k_plane[at..at + d].copy_from_slice(&k[head * d..head * d + d]);
            v_plane[at..at + d].copy_from_slice(&v[head * d..head * d + d]);
        }
    }

    /// Reads the key of token `index` into `out`: `[kv_heads][head_dim]`, adding when `accumulate`.
    pub fn read_key(&self, record: &[u8], index: usize, accumulate: bool, out: &mut [f32]) {
        let d = self.head_dim;
        let values = self.values(record);
        for head in 0..self.kv_heads {
            let at = (head * self.group + index) * d;
            for (o, x) in out[head * d..head * d + d].iter_mut().zip(&values[at..at + d]) {
                *o = if accumulate { *o + x.to_f32() } else { x.to_f32() };
            }
        }
    }

    /// Consecutive records, as prefill attention reads them.
    pub fn records<'a>(&self, bytes: &'a [u8]) -> KvRecords<'a> {
        let (group, kv_heads, d) = (self.group, self.kv_heads, self.head_dim);
        KvRecords { bytes, stride: self.stride, group, kv_heads, d, element: KvElement::F16 }
    }

    /// The first `tokens` tokens of a record, as the attention kernel reads them.
    pub fn piece<'a>(&self, record: &'a [u8], tokens: usize) -> KvPiece<'a> {
        let values = self.values(record);
        let (k, v) = values.split_at(self.plane());
        KvPiece { k, v, capacity: self.group, tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_land_where_the_format_says() {
        let layout = GroupLayout::new(2, 3, 4, 64);
        assert_eq!((layout.record_bytes(), layout.stride), (96, 128));
        let mut record = vec![0u8; layout.stride];
        let k: Vec<f32> = (0..6).map(|i| i as f32 + 1.0).collect();
        let v: Vec<f32> = k.iter().map(|x| -x).collect();
        layout.write_token(&mut record, 2, &k, &v);
        let values = layout.values(&record);
        // K of head 1, token 2 starts at (1 * 4 + 2) * 3.
        assert_eq!(values[18].to_f32(), 4.0);
        assert_eq!(values[24 + 18].to_f32(), -4.0);
        let mut back = vec![1.0; 6];
        layout.read_key(&record, 2, false, &mut back);
        assert_eq!(back, k);
        layout.read_key(&record, 2, true, &mut back);
        assert_eq!(back[5], 12.0);
    }
}
