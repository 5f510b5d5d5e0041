//! The `kv` interface: a small map for each policy and profile. Calls of a guest touch memory only; the
//! database writes changes soon after.
//!
//! A value that expires is stored behind [`EXPIRES`] and its time; others as they are. Values that have
//! expired count until they are read or the map is full.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use parking_lot::Mutex;

use crate::contract::bindings::steersman::policy::kv::{AddRefusal, Refusal};
use crate::database::{Database, MAX_PENDING};

/// Longest key, in bytes. An empty key is refused.
pub const KEY_BYTES: usize = 256;

/// What a stored value begins with if eight bytes follow, the little-endian time at which it expires. No text
/// in UTF-8 begins with it.
const EXPIRES: u8 = 0xff;

/// A map with a quota in bytes. Times are in seconds since 1970.
#[derive(Debug, Default)]
pub struct Map {
    values: BTreeMap<String, Value>,
    bytes: usize,
}

#[derive(Debug)]
struct Value {
    text: String,
    /// When it expires; `None` for never.
    expires: Option<u64>,
}

impl Value {
    fn is_live(&self, now: u64) -> bool {
        self.expires.is_none_or(|expires| now < expires)
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        if let Some(expires) = self.expires {
            bytes.push(EXPIRES);
            bytes.extend(expires.to_le_bytes());
        }
        bytes.extend(self.text.as_bytes());
        bytes
    }

    /// `None` if the bytes are no value.
    fn from_bytes(bytes: Vec<u8>) -> Option<Self> {
        let (text, expires) = match bytes.split_first_chunk::<9>() {
            Some(([EXPIRES, time @ ..], text)) => (text.to_vec(), Some(u64::from_le_bytes(*time))),
            _ => (bytes, None),
        };
        Some(Self { text: String::from_utf8(text).ok()?, expires })
    }
}

/// The time, in seconds since 1970.
pub fn now() -> u64 {
    UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs())
}

impl Map {
    /// The value of `key`.
    pub fn get(&self, key: &str, now: u64) -> Option<&str> {
        let value = self.values.get(key).filter(|value| value.is_live(now))?;
        Some(&value.text)
    }

    /// Sets it, unless all keys and values would then take more than `quota` bytes.
    ///
    /// # Errors
    /// Why not.
    pub fn set(&mut self, key: &str, value: String, quota: usize, now: u64) -> Result<(), Refusal> {
        self.insert(key, Value { text: value, expires: None }, quota, now)
    }

    fn insert(&mut self, key: &str, value: Value, quota: usize, now: u64) -> Result<(), Refusal> {
        if key.is_empty() || key.len() > KEY_BYTES {
            return Err(Refusal::BadKey);
        }
        let added = key.len() + value.text.len();
        let old = |map: &Self| map.values.get(key).map_or(0, |old| key.len() + old.text.len());
        if self.bytes - old(self) + added > quota {
            self.remove_expired(now);
        }
        let bytes = self.bytes - old(self) + added;
        if bytes > quota {
            return Err(Refusal::Full);
        }
        self.bytes = bytes;
        self.values.insert(key.to_owned(), value);
        Ok(())
    }

    /// Removes it; returns whether it existed.
    pub fn delete(&mut self, key: &str, now: u64) -> bool {
        let Some(old) = self.values.remove(key) else { return false };
        self.bytes -= key.len() + old.text.len();
        old.is_live(now)
    }

    /// Adds to a number, which is 0 if there is none; returns the sum.
    ///
    /// # Errors
    /// Why not; the map is then unchanged.
    pub fn add(&mut self, key: &str, by: i64, quota: usize, now: u64) -> Result<i64, AddRefusal> {
        let value = self.values.get(key).filter(|value| value.is_live(now));
        let expires = value.and_then(|value| value.expires);
        let old = value.map_or(Ok(0), |value| value.text.parse::<i64>());
        let sum = old.ok().and_then(|old| old.checked_add(by)).ok_or(AddRefusal::NotANumber)?;
        match self.insert(key, Value { text: sum.to_string(), expires }, quota, now) {
            Ok(()) => Ok(sum),
            Err(Refusal::BadKey) => Err(AddRefusal::BadKey),
            Err(Refusal::Full) => Err(AddRefusal::Full),
        }
    }

    /// Lets a value expire after `seconds`, or never with 0; returns whether it exists.
    pub fn expire(&mut self, key: &str, seconds: u32, now: u64) -> bool {
        let Some(value) = self.values.get_mut(key).filter(|value| value.is_live(now)) else {
            return false;
        };
        value.expires = (seconds > 0).then(|| now + u64::from(seconds));
        true
    }

    /// At most `limit` keys with this prefix after the key `after`, sorted.
    pub fn list(&self, prefix: &str, after: &str, limit: usize, now: u64) -> Vec<String> {
        let first = prefix.max(after).to_owned();
        let keys = self.values.range(first..);
        let keys = keys.take_while(|(key, _)| key.starts_with(prefix));
        let live = keys.filter(|(key, value)| key.as_str() > after && value.is_live(now));
        live.take(limit).map(|(key, _)| key.clone()).collect()
    }

    fn remove_expired(&mut self, now: u64) {
        let expired = self.values.iter().filter(|(_, value)| !value.is_live(now));
        let expired: Vec<_> = expired.map(|(key, _)| key.clone()).collect();
        for key in expired {
            self.delete(&key, now);
        }
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
            let Some(value) = Value::from_bytes(value) else { continue };
            // A smaller quota applies to new values only.
            let map = maps.entry((profile, policy)).or_default();
            let _ = map.insert(&key, value, usize::MAX, now());
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
        self.map.lock().get(key, now()).map(str::to_owned)
    }

    /// As [`Map::list`].
    pub fn list(&self, prefix: &str, after: &str, limit: usize) -> Vec<String> {
        self.map.lock().list(prefix, after, limit, now())
    }

    /// As [`Map::add`].
    ///
    /// # Errors
    /// If [`MAX_PENDING`] changes wait for the disk; inside, why the number was not added.
    pub fn add(&self, key: &str, by: i64) -> Result<Result<i64, AddRefusal>, String> {
        self.change(key, |map| {
            let sum = map.add(key, by, self.quota, now());
            (sum, sum.is_ok())
        })
    }

    /// As [`Map::expire`].
    ///
    /// # Errors
    /// If [`MAX_PENDING`] changes wait for the disk.
    pub fn expire(&self, key: &str, seconds: u32) -> Result<bool, String> {
        self.change(key, |map| {
            let exists = map.expire(key, seconds, now());
            (exists, exists)
        })
    }

    /// As [`Map::set`].
    ///
    /// # Errors
    /// If [`MAX_PENDING`] changes wait for the disk; inside, why the value was not set.
    pub fn set(&self, key: &str, value: String) -> Result<Result<(), Refusal>, String> {
        self.change(key, |map| {
            let set = map.set(key, value, self.quota, now());
            (set, set.is_ok())
        })
    }

    /// As [`Map::delete`].
    ///
    /// # Errors
    /// If [`MAX_PENDING`] changes wait for the disk.
    pub fn delete(&self, key: &str) -> Result<bool, String> {
        self.change(key, |map| {
            let deleted = map.delete(key, now());
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
            let value = map.values.get(key).map(Value::to_bytes);
            self.database.set(record, value.as_deref());
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
        let set =
            |map: &mut Map, key: &str, bytes: usize| map.set(key, "x".repeat(bytes), QUOTA, 0);
        assert_eq!(set(&mut map, "", 1), Err(Refusal::BadKey));
        assert_eq!(set(&mut map, &"k".repeat(KEY_BYTES + 1), 1), Err(Refusal::BadKey));
        assert_eq!(set(&mut map, &"k".repeat(KEY_BYTES), QUOTA - KEY_BYTES), Ok(()));
        assert_eq!(set(&mut map, "b", 0), Err(Refusal::Full));
        assert_eq!(set(&mut map, &"k".repeat(KEY_BYTES), QUOTA - KEY_BYTES - 1), Ok(()));
        assert_eq!(set(&mut map, "b", 0), Ok(()));
        assert_eq!(set(&mut map, "b", 1), Err(Refusal::Full));
        assert!(map.delete(&"k".repeat(KEY_BYTES), 0));
        assert_eq!(set(&mut map, "b", QUOTA - 1), Ok(()));
        assert_eq!(map.bytes, QUOTA);
    }

    #[test]
    fn a_number_is_added_to_in_one_step_and_anything_else_is_refused() {
        let mut map = Map::default();
        assert_eq!((map.add("n", 5, QUOTA, 0), map.add("n", -7, QUOTA, 0)), (Ok(5), Ok(-2)));
        assert_eq!(map.get("n", 0), Some("-2"));
        assert_eq!(map.add("n", i64::MIN, QUOTA, 0), Err(AddRefusal::NotANumber));
        map.set("text", "five".into(), QUOTA, 0).unwrap();
        assert_eq!(map.add("text", 1, QUOTA, 0), Err(AddRefusal::NotANumber));
        assert_eq!(map.add("", 1, QUOTA, 0), Err(AddRefusal::BadKey));
        assert_eq!(map.add("other", 1, 11, 0), Err(AddRefusal::Full));
        assert_eq!((map.get("n", 0), map.get("text", 0)), (Some("-2"), Some("five")));
    }

    #[test]
    fn a_value_expires_unless_it_is_set_again() {
        let mut map = Map::default();
        map.add("n", 5, QUOTA, 100).unwrap();
        assert!(map.expire("n", 10, 100) && !map.expire("missing", 10, 100));
        assert_eq!(map.add("n", 1, QUOTA, 109), Ok(6));
        assert_eq!((map.get("n", 109), map.get("n", 110)), (Some("6"), None));
        assert!(!map.expire("n", 10, 110) && map.list("", "", 9, 110).is_empty());
        assert_eq!(map.add("n", 1, QUOTA, 110), Ok(1));
        assert_eq!(map.get("n", 10_000), Some("1"));
        assert!(map.expire("n", 10, 200) && map.expire("n", 0, 205));
        assert_eq!(map.get("n", 10_000), Some("1"));
        map.expire("n", 1, 10_000);
        map.set("n", "2".into(), QUOTA, 10_000).unwrap();
        assert_eq!(map.get("n", 20_000), Some("2"));
        // What has expired makes room.
        map.set("old", "x".repeat(QUOTA - 5), QUOTA, 0).unwrap();
        map.expire("old", 5, 0);
        assert_eq!(map.set("new", "x".into(), QUOTA, 4), Err(Refusal::Full));
        assert_eq!(map.set("new", "x".into(), QUOTA, 5), Ok(()));
        assert_eq!(map.bytes, "n2newx".len());
    }

    #[test]
    fn keys_are_listed_page_by_page() {
        let mut map = Map::default();
        for key in ["b", "a/2", "a/1", "a/3", "a", "a0"] {
            map.set(key, String::new(), QUOTA, 0).unwrap();
        }
        assert_eq!(map.list("a/", "", 2, 0), ["a/1", "a/2"]);
        assert_eq!(map.list("a/", "a/2", 2, 0), ["a/3"]);
        assert_eq!(map.list("", "a0", 9, 0), ["b"]);
        assert_eq!(map.list("c", "", 9, 0), [""; 0]);
    }

    #[test]
    fn the_time_at_which_a_value_expires_survives_a_restart() {
        let storage = Storage::in_memory();
        let open = || Kv::new(storage.database.clone(), QUOTA).space("p", "q");
        let space = open();
        for key in ["soon", "later", "never"] {
            space.set(key, "ä".into()).unwrap().unwrap();
        }
        assert_eq!((space.expire("soon", 1), space.expire("later", 1000)), (Ok(true), Ok(true)));
        std::thread::sleep(std::time::Duration::from_millis(1100));
        let space = open();
        let values = ["soon", "later", "never"].map(|key| space.get(key));
        assert_eq!(values, [None, Some("ä".into()), Some("ä".into())]);
    }
}
