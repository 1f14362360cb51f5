//! The block table: the pieces that a step's attention reads, in order, where they lie.

use forebay_kernels::attention::KvPiece;

/// A list of pieces whose room is taken once.
///
/// Between two steps the list is empty; while it holds pieces, the borrow in [`BlockTable::fill`] keeps their memory alive.
pub struct BlockTable {
    pieces: Vec<KvPiece<'static>>,
}

impl BlockTable {
    /// Room for `pieces` pieces.
    pub fn new(pieces: usize) -> BlockTable {
        BlockTable { pieces: Vec::with_capacity(pieces) }
    }

    /// Gathers `pieces` and hands them to `read`; nothing is allocated while they fit the room.
    pub fn fill<'a, R>(
        &mut self,
        pieces: impl Iterator<Item = KvPiece<'a>>,
        read: impl FnOnce(&[KvPiece<'a>]) -> R,
    ) -> R {
        debug_assert!(self.pieces.is_empty());
        let mut list: Vec<KvPiece<'a>> = std::mem::take(&mut self.pieces);
        list.extend(pieces);
        let result = read(&list);
        list.clear();
        let mut list = std::mem::ManuallyDrop::new(list);
        // SAFETY: the list is empty, so no value of the shorter lifetime is left in it; pointer and capacity come from a Vec of
        // the same type but for that lifetime, which layout does not depend on.
        self.pieces = unsafe { Vec::from_raw_parts(list.as_mut_ptr().cast(), 0, list.capacity()) };
        result
    }
}
