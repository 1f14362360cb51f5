//! The reuse buffer's slot table: which group lies in which slot of a layer, and which leaves next.

use crate::config::Replacement;

const EMPTY: u16 = u16::MAX;
const NO_GROUP: u32 = u32::MAX;

/// Slot table of one layer. Holds no records, only which group is where.
#[derive(Debug)]
pub struct SlotTable {
    /// Slot of each group, `EMPTY` where it has none.
    slot_of_group: Box<[u16]>,
    /// Group of each slot.
    group_of_slot: Box<[u32]>,
    /// Slots from the next to leave to the last to leave.
    order: Box<[u16]>,
    /// Slots that the current step reads; they are never given away under it.
    in_use: Box<[bool]>,
    replacement: Replacement,
}

impl SlotTable {
    /// Bytes that a table takes.
    pub fn bytes(slots: usize, groups: usize) -> usize {
        groups * size_of::<u16>() + slots * (size_of::<u32>() + size_of::<u16>() + size_of::<bool>())
    }

    /// An empty table for `slots` slots over `groups` groups.
    pub fn new(slots: usize, groups: usize, replacement: Replacement) -> SlotTable {
        SlotTable {
            slot_of_group: vec![EMPTY; groups].into(),
            group_of_slot: vec![NO_GROUP; slots].into(),
            order: (0..slots as u16).collect(),
            in_use: vec![false; slots].into(),
            replacement,
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.slot_of_group.fill(EMPTY);
        self.group_of_slot.fill(NO_GROUP);
        self.in_use.fill(false);
    }

    /// The slot that holds `group`.
    pub fn find(&self, group: u32) -> Option<usize> {
        self.slot_of_group.get(group as usize).copied().filter(|&s| s != EMPTY).map(usize::from)
    }

    /// Marks the slot of `group` as read by the current step; for LRU it becomes the last to leave.
    pub fn touch(&mut self, slot: usize) {
        self.in_use[slot] = true;
        if self.replacement == Replacement::Lru
            && let Some(at) = self.order.iter().position(|&s| usize::from(s) == slot)
        {
            self.order[at..].rotate_left(1);
        }
    }

    /// Ends the current step: every slot may leave again.
    pub fn release(&mut self) {
        self.in_use.fill(false);
    }

    /// Gives `group` a slot, taking it from the group that leaves next. `None` when the step reads every slot.
    pub fn insert(&mut self, group: u32) -> Option<usize> {
        debug_assert!(self.find(group).is_none(), "a group has at most one slot");
        let at = self.order.iter().position(|&s| !self.in_use[usize::from(s)])?;
        let slot = usize::from(self.order[at]);
        self.order[at..].rotate_left(1);
        let old = std::mem::replace(&mut self.group_of_slot[slot], group);
        if old != NO_GROUP {
            self.slot_of_group[old as usize] = EMPTY;
        }
        self.slot_of_group[group as usize] = slot as u16;
        // A group inserted by this step is not pushed out by the next insertion of the same step.
        self.in_use[slot] = true;
        Some(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fifo_ignores_use_and_lru_follows_it() {
        for (replacement, survivor, gone) in [(Replacement::Fifo, 2, 1), (Replacement::Lru, 1, 2)] {
            let mut table = SlotTable::new(2, 10, replacement);
            table.insert(1);
            table.insert(2);
            table.release();
            let slot = table.find(1).unwrap();
            table.touch(slot);
            table.release();
            table.insert(3).unwrap();
            assert!(table.find(survivor).is_some() && table.find(gone).is_none(), "{replacement:?}");
        }
    }

    proptest! {
        /// Against a plain list: contents agree, no slot is shared, slots in use stay.
        #[test]
        fn behaves_like_a_queue(slots in 0usize..6, groups in proptest::collection::vec((0u32..12, any::<bool>()), 1..80)) {
            let mut table = SlotTable::new(slots, 12, Replacement::Fifo);
            let mut queue: Vec<u32> = Vec::new();
            for (group, end_step) in groups {
                match table.find(group) {
                    Some(slot) => { prop_assert!(queue.contains(&group)); table.touch(slot); }
                    None => {
                        prop_assert!(!queue.contains(&group));
                        let in_use: Vec<u32> = queue.iter().copied()
                            .filter(|&g| table.in_use[table.find(g).unwrap()]).collect();
                        let inserted = table.insert(group).is_some();
                        prop_assert_eq!(inserted, in_use.len() < slots);
                        if inserted {
                            if queue.len() == slots {
                                let at = queue.iter().position(|g| !in_use.contains(g)).unwrap();
                                queue.remove(at);
                            }
                            queue.push(group);
                        }
                    }
                }
                if end_step { table.release(); }
                for g in 0..12 { prop_assert_eq!(table.find(g).is_some(), queue.contains(&g)); }
                let mut used: Vec<usize> = queue.iter().map(|&g| table.find(g).unwrap()).collect();
                used.sort_unstable();
                used.dedup();
                prop_assert_eq!(used.len(), queue.len());
            }
        }
    }
}
