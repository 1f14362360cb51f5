//! From the groups that a layer needs to the reads that bring them.

use super::{StoreError, StoreLayout};

/// How groups are joined into reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanLimits {
    /// Groups that may be read needlessly to join two extents; 0 joins neighbours only.
    pub merge_gap: u32,
    /// Bytes of an extent at most; an extent always holds at least one group.
    pub extent_bytes_max: u32,
    /// Staging slots that there are; extents are joined only while those that remain hold the remaining groups.
    pub slots_max: u32,
}

impl Default for PlanLimits {
    /// Neighbours only; a megabyte at once, beyond which no disk gains.
    fn default() -> Self {
        Self { merge_gap: 0, extent_bytes_max: 1 << 20, slots_max: u32::MAX }
    }
}

/// One read: consecutive groups into consecutive staging slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First group.
    pub first_group: u32,
    /// Groups, needless ones included.
    pub group_count: u32,
    /// Staging slot of the first group.
    pub first_slot: u32,
}

/// The reads of one layer and step. Building one changes nothing else; its buffers are reused from build to build.
#[derive(Clone, Debug, Default)]
pub struct ReadPlan {
    layer: u32,
    stride: u32,
    groups: Vec<u32>,
    slots: Vec<u32>,
    extents: Vec<Extent>,
    slot_count: u32,
}

/// Staging slots, of one stride each, that a plan for `groups_max` groups can need at most.
pub fn staging_slots(groups_max: usize, merge_gap: u32) -> usize {
    groups_max + groups_max.saturating_sub(1) * merge_gap as usize
}

impl ReadPlan {
    /// An empty plan that can be built for up to `groups_max` groups without allocating.
    pub fn with_capacity(groups_max: usize) -> Self {
        Self {
            groups: Vec::with_capacity(groups_max),
            slots: Vec::with_capacity(groups_max),
            extents: Vec::with_capacity(groups_max),
            ..Self::default()
        }
    }

    /// Plans the reads of `groups` of `layer`. An index outside the store or not above the one before it is an error,
    /// and leaves the plan empty.
    pub fn build(
        &mut self,
        layout: &StoreLayout,
        layer: u32,
        groups: &[u32],
        limits: PlanLimits,
    ) -> Result<(), StoreError> {
        self.clear();
        self.check(layout, layer, groups)?;
        self.layer = layer;
        self.stride = layout.stride();
        let groups_max = (limits.extent_bytes_max / layout.stride()).max(1);
        for (i, &group) in groups.iter().enumerate() {
            let after = (groups.len() - i - 1) as u32;
            let joined = self.extents.last_mut().is_some_and(|extent| {
                let end = extent.first_group + extent.group_count;
                let with_group = group - extent.first_group + 1;
                let slots = self.slot_count + (with_group - extent.group_count);
                let room = slots.saturating_add(after) <= limits.slots_max;
                let joins = group - end <= limits.merge_gap && with_group <= groups_max && room;
                if joins {
                    self.slot_count = slots;
                    extent.group_count = with_group;
                }
                joins
            });
            if !joined {
                self.extents.push(Extent { first_group: group, group_count: 1, first_slot: self.slot_count });
                self.slot_count += 1;
            }
            self.groups.push(group);
            self.slots.push(self.slot_count - 1);
        }
        Ok(())
    }

    fn check(&self, layout: &StoreLayout, layer: u32, groups: &[u32]) -> Result<(), StoreError> {
        let Some(&last) = groups.last() else { return Ok(()) };
        layout.check_range(layer, last, 1)?;
        match groups.windows(2).find(|pair| pair[1] <= pair[0]) {
            Some(pair) => Err(StoreError::Request {
                what: "group after its predecessor",
                found: pair[1].into(),
                expected: u64::from(pair[0]) + 1,
            }),
            None => Ok(()),
        }
    }

    /// Empties the plan and keeps its memory.
    pub fn clear(&mut self) {
        self.groups.clear();
        self.slots.clear();
        self.extents.clear();
        self.slot_count = 0;
    }

    /// The layer.
    pub fn layer(&self) -> u32 {
        self.layer
    }

    /// The groups asked for, ascending.
    pub fn groups(&self) -> &[u32] {
        &self.groups
    }

    /// Staging slot of each group of [`ReadPlan::groups`]: its record begins `slot * stride` bytes into the staging
    /// buffer.
    pub fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// The reads, ascending.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Slots that the reads fill, needless ones included.
    pub fn slot_count(&self) -> u32 {
        self.slot_count
    }

    /// Bytes of staging that the reads fill.
    pub fn staging_bytes(&self) -> u64 {
        u64::from(self.slot_count) * u64::from(self.stride)
    }

    /// Whether there is nothing to read.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Alignment;
    use super::*;
    use proptest::prelude::*;

    fn layout() -> StoreLayout {
        StoreLayout::new(2, 1000, 512, Alignment { memory: 512, offset: 512 }).unwrap()
    }

    fn limits(merge_gap: u32, groups_max: u32) -> PlanLimits {
        PlanLimits { merge_gap, extent_bytes_max: groups_max * 512, ..PlanLimits::default() }
    }

    #[test]
    fn neighbours_and_gaps() {
        let mut plan = ReadPlan::default();
        plan.build(&layout(), 1, &[3, 4, 7, 20], limits(0, 100)).unwrap();
        let extent = |first_group, group_count, first_slot| Extent { first_group, group_count, first_slot };
        assert_eq!(plan.extents(), [extent(3, 2, 0), extent(7, 1, 2), extent(20, 1, 3)]);
        assert_eq!(plan.slots(), [0, 1, 2, 3]);
        plan.build(&layout(), 1, &[3, 4, 7, 20], limits(2, 100)).unwrap();
        assert_eq!(plan.extents(), [extent(3, 5, 0), extent(20, 1, 5)]);
        assert_eq!(plan.slots(), [0, 1, 4, 5]);
        assert_eq!((plan.slot_count(), plan.staging_bytes()), (6, 6 * 512));
        // Of seven slots the last group needs one, so the gap of two is joined and one of three is not.
        let seven = PlanLimits { slots_max: 7, ..limits(3, 100) };
        plan.build(&layout(), 1, &[3, 4, 7, 11], seven).unwrap();
        assert_eq!(plan.extents(), [extent(3, 5, 0), extent(11, 1, 5)]);
        plan.build(&layout(), 1, &[3, 4, 7, 11], PlanLimits { slots_max: 4, ..seven }).unwrap();
        assert_eq!(plan.slot_count(), 4);
        plan.build(&layout(), 1, &[3, 4, 5, 6], limits(2, 3)).unwrap();
        assert_eq!(plan.extents(), [extent(3, 3, 0), extent(6, 1, 3)]);
        plan.build(&layout(), 0, &[], limits(0, 1)).unwrap();
        assert!(plan.is_empty() && plan.extents().is_empty());
    }

    #[test]
    fn bad_lists_are_errors() {
        let mut plan = ReadPlan::default();
        for groups in [&[1, 1][..], &[2, 1], &[1000], &[5, u32::MAX]] {
            assert!(plan.build(&layout(), 0, groups, PlanLimits::default()).is_err(), "{groups:?}");
            assert!(plan.is_empty());
        }
        assert!(plan.build(&layout(), 2, &[0], PlanLimits::default()).is_err());
    }

    proptest! {
        #[test]
        fn every_group_lands_in_its_slot(
            groups in proptest::collection::btree_set(0u32..1000, 0..200),
            gap in 0u32..6,
            groups_max in 1u32..20,
        ) {
            let groups: Vec<u32> = groups.into_iter().collect();
            let mut plan = ReadPlan::with_capacity(groups.len());
            let capacity = (plan.groups.capacity(), plan.extents.capacity());
            plan.build(&layout(), 0, &groups, limits(gap, groups_max)).unwrap();
            prop_assert_eq!((plan.groups.capacity(), plan.extents.capacity()), capacity);
            prop_assert_eq!(plan.groups(), &groups[..]);
            prop_assert!(plan.slot_count() as usize <= staging_slots(groups.len(), gap));
            let mut contents = vec![None; plan.slot_count() as usize];
            for extent in plan.extents() {
                prop_assert!(extent.group_count <= groups_max);
                for i in 0..extent.group_count {
                    let slot = &mut contents[(extent.first_slot + i) as usize];
                    prop_assert!(slot.is_none());
                    *slot = Some(extent.first_group + i);
                }
                // Neither end of an extent is read needlessly.
                prop_assert!(groups.contains(&extent.first_group));
                prop_assert!(groups.contains(&(extent.first_group + extent.group_count - 1)));
            }
            prop_assert!(contents.iter().all(Option::is_some));
            for (&group, &slot) in groups.iter().zip(plan.slots()) {
                prop_assert_eq!(contents[slot as usize], Some(group));
            }
        }
    }
}
