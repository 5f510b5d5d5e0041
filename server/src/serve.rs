//! Listening and graceful shutdown.

use std::future::Future;
use std::io::ErrorKind;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use axum::Router;
use axum::serve::ListenerExt;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::config::ServerConfig;

/// Listens on the configured address.
///
/// # Errors
/// If the address is in use or not available; the message says what to do.
pub async fn listen(config: &ServerConfig) -> Result<TcpListener> {
    let (host, port) = (config.host.as_str(), config.port);
    TcpListener::bind((host, port)).await.map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => anyhow!(
            "port {port} on {host} is in use: is Steersman already running? Stop it, or choose \
             another port with --port"
        ),
        ErrorKind::PermissionDenied => {
            anyhow!("this user may not listen on port {port}; choose one from 1024 up with --port")
        }
        _ => anyhow!(error).context(format!("listening on {host}, port {port}")),
    })
}

/// Serves until `stop` is ready, then waits for running requests until `grace` is over or a second
/// stop signal arrives.
///
/// # Errors
/// If the listener fails.
pub async fn run(
    listener: TcpListener,
    app: Router,
    stop: impl Future<Output = ()> + Send + 'static,
    grace: Duration,
) -> Result<()> {
    let (stopping, stopped) = oneshot::channel();
    // Nagle's algorithm would delay each small chunk until the previous one is acknowledged.
    let listener = listener.tap_io(|socket| {
        if let Err(error) = socket.set_nodelay(true) {
            tracing::debug!(%error, "setting TCP_NODELAY failed");
        }
    });
    let graceful = axum::serve(listener, app).with_graceful_shutdown(async move {
        stop.await;
        // Fails only if serving has already ended.
        let _ = stopping.send(());
    });
    let too_late = async {
        if stopped.await.is_err() {
            // Serving ended; the other branch returns its result.
            std::future::pending::<()>().await;
        }
        tokio::select! {
            () = tokio::time::sleep(grace) => {}
            () = stop_signal() => {}
        }
    };
    tokio::select! {
        served = graceful => served.context("serving"),
        () = too_late => {
            tracing::warn!("shutdown timed out; aborting running requests");
            Ok(())
        }
    }
}

/// Waits for Ctrl-C, or on Unix for SIGTERM.
pub async fn stop_signal() {
    let interrupt = async {
        if let Err(error) = tokio::signal::ctrl_c().await {
            tracing::warn!(%error, "no handler for Ctrl-C");
            std::future::pending::<()>().await;
        }
    };
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        match signal(SignalKind::terminate()) {
            Ok(mut terminate) => tokio::select! {
                () = interrupt => {}
                _ = terminate.recv() => {}
            },
            Err(error) => {
                tracing::warn!(%error, "no handler for SIGTERM");
                interrupt.await;
            }
        }
    }
    #[cfg(not(unix))]
    interrupt.await;
}
