//! A server with a model, on a port of its own.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde_json::Value;
use steersman::config::ServerConfig;
use steersman_tests::{Running, config, tiny_model};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufStream};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::{ADMIN, DEADLINE_MS, version};

/// A server with an admin key and a policy folder.
pub struct Served {
    pub address: SocketAddr,
    pub folder: tempfile::TempDir,
    engine: Running,
    _data: tempfile::TempDir,
    serving: JoinHandle<()>,
}

impl Served {
    /// Starts a server with these policies in version `a`, each in a profile of its name.
    pub async fn start(policies: &[&str]) -> Self {
        let (folder, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut config = config();
        config.store.enabled = false;
        config.store.ahead = false;
        config.speculation.drafts.clear();
        config.model.name = "tiny".into();
        config.policy.deadline_ms = DEADLINE_MS;
        config.policy.folder = folder.path().into();
        for &name in policies {
            fs::write(in_folder(folder.path(), name), version("a")).unwrap();
            let profile = steersman_tests::profile(name);
            config.profiles.insert(name.into(), profile);
        }
        let model = tempfile::tempdir().unwrap();
        tiny_model(model.path());
        let engine = Running::try_start(config, model.path(), data.path()).unwrap();
        let server = ServerConfig { admin_keys: vec![ADMIN.into()], ..ServerConfig::default() };
        let app = steersman::app((*engine).clone(), &server);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { address, folder, engine, _data: data, serving }
    }

    /// The file of a policy.
    pub fn file(&self, policy: &str) -> PathBuf {
        in_folder(self.folder.path(), policy)
    }

    /// Ends the server and its engine.
    pub async fn end(self) {
        self.serving.abort();
        drop(self.serving.await);
        drop(self.engine);
    }
}

fn in_folder(folder: &Path, policy: &str) -> PathBuf {
    folder.join(format!("{policy}.wasm"))
}

/// A connection for one request after another.
pub struct Connection(BufStream<TcpStream>);

impl Connection {
    pub async fn open(address: SocketAddr) -> Self {
        Self(BufStream::new(TcpStream::connect(address).await.unwrap()))
    }

    /// Posts a body; returns the status and the JSON.
    pub async fn post(&mut self, path: &str, content_type: &str, body: &[u8]) -> (u16, Value) {
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ADMIN}\r\n\
             Content-Type: {content_type}\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        self.0.write_all(head.as_bytes()).await.unwrap();
        self.0.write_all(body).await.unwrap();
        self.0.flush().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(self.0.read_u8().await.unwrap());
        }
        let head = String::from_utf8(head).unwrap().to_lowercase();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let (_, length) = head.split_once("content-length: ").expect("replies say their length");
        let mut body = vec![0; length.lines().next().unwrap().parse().unwrap()];
        self.0.read_exact(&mut body).await.unwrap();
        (status, serde_json::from_slice(&body).unwrap())
    }
}
