//! The `kv` interface: a small map for each policy and profile. Calls of a guest touch memory only; the
//! database writes changes soon after.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::contract::bindings::steersman::policy::kv::Refusal;
use crate::database::{Database, MAX_PENDING};

/// Longest key, in bytes. An empty key is refused.
pub const KEY_BYTES: usize = 256;

/// A map with a quota in bytes.
#[derive(Debug, Default)]
pub struct Map {
    values: BTreeMap<String, String>,
    bytes: usize,
}

impl Map {
    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.values.get(key).map(String::as_str)
    }

    /// Sets it, unless all keys and values would then take more than `quota` bytes.
    ///
    /// # Errors
    /// Why not.
    pub fn set(&mut self, key: &str, value: String, quota: usize) -> Result<(), Refusal> {
        if key.is_empty() || key.len() > KEY_BYTES {
            return Err(Refusal::BadKey);
        }
        let old = self.values.get(key).map_or(0, |old| key.len() + old.len());
        let bytes = self.bytes - old + key.len() + value.len();
        if bytes > quota {
            return Err(Refusal::Full);
        }
        self.bytes = bytes;
        self.values.insert(key.to_owned(), value);
        Ok(())
    }

    /// Removes it; returns whether it existed.
    pub fn delete(&mut self, key: &str) -> bool {
        let Some(old) = self.values.remove(key) else { return false };
        self.bytes -= key.len() + old.len();
        true
    }
}

/// By profile and policy.
type Maps = BTreeMap<(String, String), Arc<Mutex<Map>>>;

/// The maps of all policies.
pub struct Kv {
    database: Arc<Database>,
    quota: usize,
    maps: Mutex<Maps>,
}

/// The map of one policy in one profile.
pub struct Space {
    database: Arc<Database>,
    quota: usize,
    profile: String,
    policy: String,
    map: Arc<Mutex<Map>>,
}

impl Kv {
    /// The maps in `database`, each of which may take `quota` bytes.
    pub fn new(database: Arc<Database>, quota: usize) -> Self {
        let mut maps = BTreeMap::<_, Map>::new();
        for ((profile, policy, key), value) in database.of_profiles() {
            let Ok(value) = String::from_utf8(value) else { continue };
            // A smaller quota applies to new values only.
            let _ = maps.entry((profile, policy)).or_default().set(&key, value, usize::MAX);
        }
        let maps = maps.into_iter().map(|(of, map)| (of, Arc::new(Mutex::new(map)))).collect();
        Self { database, quota, maps: Mutex::new(maps) }
    }

    /// The map of a policy in a profile.
    pub fn space(&self, profile: &str, policy: &str) -> Space {
        let (profile, policy) = (profile.to_owned(), policy.to_owned());
        let mut maps = self.maps.lock();
        let map = maps.entry((profile.clone(), policy.clone())).or_default().clone();
        Space { database: self.database.clone(), quota: self.quota, profile, policy, map }
    }
}

impl Space {
    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<String> {
        self.map.lock().get(key).map(str::to_owned)
    }

    /// As [`Map::set`].
    ///
    /// # Errors
    /// If [`MAX_PENDING`] changes wait for the disk; inside, why the value was not set.
    pub fn set(&self, key: &str, value: String) -> Result<Result<(), Refusal>, String> {
        self.change(key, |map| {
            let set = map.set(key, value, self.quota);
            (set, set.is_ok())
        })
    }

    /// As [`Map::delete`].
    ///
    /// # Errors
    /// If [`MAX_PENDING`] changes wait for the disk.
    pub fn delete(&self, key: &str) -> Result<bool, String> {
        self.change(key, |map| {
            let deleted = map.delete(key);
            (deleted, deleted)
        })
    }

    /// Changes the map in memory. If `change` returns that it changed it, also on disk.
    fn change<T>(
        &self,
        key: &str,
        change: impl FnOnce(&mut Map) -> (T, bool),
    ) -> Result<T, String> {
        let record = (self.profile.clone(), self.policy.clone(), key.to_owned());
        if !self.database.has_room(&record) {
            return Err(format!("{MAX_PENDING} changes wait for the disk"));
        }
        let mut map = self.map.lock();
        let (result, changed) = change(&mut map);
        if changed {
            self.database.set(record, map.get(key).map(str::as_bytes));
        }
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::database::Storage;

    const QUOTA: usize = 1000;

    #[test]
    fn maps_survive_a_restart_and_are_separate_per_profile_and_policy() {
        let storage = Storage::in_memory();
        let open = || Kv::new(storage.database.clone(), QUOTA);
        let kv = open();
        let space = kv.space("agent", "guard");
        space.set("seen", "1".into()).unwrap().unwrap();
        space.set("gone", "2".into()).unwrap().unwrap();
        kv.space("agent", "other").set("seen", "3".into()).unwrap().unwrap();
        assert_eq!((space.delete("gone"), space.delete("gone")), (Ok(true), Ok(false)));
        let check = |kv: &Kv| {
            let get = |profile: &str, policy: &str, key: &str| kv.space(profile, policy).get(key);
            assert_eq!(get("agent", "guard", "seen").as_deref(), Some("1"));
            assert_eq!(get("agent", "guard", "gone"), None);
            assert_eq!(get("agent", "other", "seen").as_deref(), Some("3"));
            assert_eq!(get("default", "guard", "seen"), None);
        };
        check(&kv);
        check(&open());
    }

    #[test]
    fn keys_and_values_together_stay_within_the_quota() {
        let mut map = Map::default();
        let set = |map: &mut Map, key: &str, bytes: usize| map.set(key, "x".repeat(bytes), QUOTA);
        assert_eq!(set(&mut map, "", 1), Err(Refusal::BadKey));
        assert_eq!(set(&mut map, &"k".repeat(KEY_BYTES + 1), 1), Err(Refusal::BadKey));
        assert_eq!(set(&mut map, &"k".repeat(KEY_BYTES), QUOTA - KEY_BYTES), Ok(()));
        assert_eq!(set(&mut map, "b", 0), Err(Refusal::Full));
        assert_eq!(set(&mut map, &"k".repeat(KEY_BYTES), QUOTA - KEY_BYTES - 1), Ok(()));
        assert_eq!(set(&mut map, "b", 0), Ok(()));
        assert_eq!(set(&mut map, "b", 1), Err(Refusal::Full));
        assert!(map.delete(&"k".repeat(KEY_BYTES)));
        assert_eq!(set(&mut map, "b", QUOTA - 1), Ok(()));
        assert_eq!(map.bytes, QUOTA);
    }
}
